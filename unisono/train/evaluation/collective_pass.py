"""Run a model over a data set on all processes, between two steps: for an evaluation, or a prediction."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from unisono import phases
from unisono.data.eval_loader import EvalLoader
from unisono.data.loader import Collate
from unisono.distributed.process_group import wrap_peer_errors
from unisono.train.context import RunContext
from unisono.train.evaluation.model_call import Forward, evaluation_mode
from unisono.train.evaluation.model_outputs import ModelOutputs


@contextmanager
def collective_pass(
    context: RunContext,
    verb: str,
    model: torch.nn.Module,
    data: Any,
    forward: Forward | None,
    collate: Collate | None,
) -> Iterator[ModelOutputs]:
    """Return a block in which all processes run a model over a data set, as an attempt at a collective.

    Args:
        context: the context of the run.
        verb: "run.evaluate" or "run.predict".
        model: the model.
        data: the data set.
        forward: forward(model, batch) -> output.
        collate: a list of samples -> a batch.
    """
    models, progress, settings = context.models, context.progress, context.settings
    loader = EvalLoader(
        data, f"The data set of {verb}", settings, context.mesh.data, collate, lockstep=models.needs_lockstep
    )
    context.loop.refresh()
    all_models = [model, *models.modules, *models.tracked]
    as_one, in_eval_mode = context.loop.as_one(all_models), evaluation_mode(all_models, context.device)
    with phases.phase("evaluate"), wrap_peer_errors(verb), as_one, in_eval_mode as restore, models.around_loss():
        models.busy = True
        if settings.parallel.reshard == "step":
            models.gather()
        yield ModelOutputs(
            model,
            loader,
            forward=forward,
            must_leave=lambda: progress.leaving and progress.ended is not None,
            ended=models.end_evaluation,
            restore=restore,
            pipeline=models.pipeline,
        )
        models.busy = False
