"""What processes make of a data set together, between two steps: an evaluation, or a prediction. It can be made again,
if one of them dies meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from unisono import phases
from unisono.data.eval_loader import EvalLoader
from unisono.data.loader import Collate
from unisono.distributed.process_group import wrap_peer_errors
from unisono.train.evaluation.model_outputs import Forward, ModelOutputs, evaluation_mode

if TYPE_CHECKING:
    from unisono.train.run import Run

T = TypeVar("T")


def run_collective_pass(
    run: Run[Any],
    verb: str,
    fold: Callable[[ModelOutputs], T],
    model: torch.nn.Module,
    data: Any,
    forward: Forward | None,
    collate: Collate | None,
) -> T:
    """What `fold` makes of the model's outputs over the data."""
    models = run._models

    def body() -> T:
        if run._last_step is not None:
            run._last_step.refuse_within(verb)
        run._table.require_same_call(verb)
        walk = EvalLoader(
            data, f"The data set of {verb}", run.settings, run._mesh.data, collate, abreast=models.needs_lockstep
        )
        all_models = [model, *models.modules, *models.tracked]
        as_one, rest = run._sites.as_one(all_models), evaluation_mode(all_models, run.device)
        with phases.phase("evaluate"), wrap_peer_errors(verb), as_one, rest as fresh, models.around_loss():
            models.busy = True
            if run.settings.parallel.reshard == "step":
                models.gather()
            hurry = lambda: run._leave and run._ended is not None  # noqa: E731
            over, line = models.end_evaluation, models.pipeline
            outputs = ModelOutputs(model, walk, forward=forward, hurry=hurry, over=over, fresh=fresh, pipeline=line)
            found = fold(outputs)
            models.busy = False
        return found

    return run.together(verb, body, again=not isinstance(data, Iterator))  # which can be walked through only once
