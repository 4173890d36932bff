"""Evaluate a model and its exported program with the evaluation of the script.

    checkpoint --> script, on one process --> last step, without its update --> first run.evaluate(model, ...)
                                              optimizers and schedules do not   once with the model, and once with
                                              step, so the weights stay         the program in its place

The script chooses data, measure and forward. The run ends after this evaluation, so later code of the script is not
executed.
"""

from __future__ import annotations

import json
import sys
import sysconfig
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from unisono.errors import RunStopped
from unisono.export import load_again
from unisono.export.formats import QualityRequest
from unisono.train.context import Inspection, LoopParts, RunContext
from unisono.train.evaluation.collective_pass import collective_pass
from unisono.train.evaluation.evaluate import evaluate
from unisono.train.evaluation.model_call import Evaluation, call
from unisono.train.extensions import Extension
from unisono.train.step_state import StepState

FLAT = ("onnx", "executorch")
"""Formats whose programs return a list of tensors, whatever the model returns."""


class ProgramCall:
    """Call a program as the model is called, and return its outputs in the structure of those of the model.

    Args:
        program: The loaded program.
        model: The model.
        flat: Whether the program returns a list of tensors.
    """

    def __init__(self, program: load_again.Call, model: torch.nn.Module, *, flat: bool) -> None:
        self.program, self.model, self.flat = program, model, flat
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        found = self.program(*args, **kwargs)
        if not self.flat:
            return found
        tensors = iter(load_again.tensors_of(found))
        return tree_map_only(torch.Tensor, lambda _: next(tensors), self.model(*args, **kwargs))


class StepWithoutUpdate(Extension):
    """Let the loop compute its last step, without a change of the model.

    Args:
        request: What to evaluate.
        context: The context of the run.
        parts: The parts of its loop.
    """

    def __init__(self, request: QualityRequest, context: RunContext, parts: LoopParts) -> None:
        self._model = context.state.model_named(request.model)
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        parts.sync.steps_optimizers = False
        last = max(context.progress.last - 1, 0)
        context.progress.steps_done = last  # so that conditions such as step.ends_epoch hold
        parts.source.follow(iter([last]))

    def before_step(self, step: StepState) -> None:
        self._before = [(each, each.detach().clone()) for each in (*self._model.parameters(), *self._model.buffers())]

    def updated(self, step: StepState) -> None:
        with torch.no_grad():
            for tensor, value in self._before:
                tensor.copy_(value)


def evaluate_program(request: QualityRequest, context: RunContext, evaluation: Evaluation) -> None:
    """Compute an evaluation of the exported model twice, with the model and with its program, and end the run.

    An evaluation of another model is left alone.
    """
    models = context.state.models  # empty before run.track
    model = models.get(request.model or next(iter(models), ""))
    if model is None or evaluation.model is not model:
        return
    if isinstance(evaluation.data, Iterator):  # it is read twice
        evaluation = evaluation._replace(data=list(evaluation.data))
    found: dict[str, Any] = {"original": _means(context, evaluation)}
    forward: Callable[..., Any] = evaluation.forward or call
    try:
        program = ProgramCall(load_again.LOADERS[request.format](request.program), model, flat=request.format in FLAT)
        found["exported"] = _means(context, evaluation._replace(forward=lambda _, batch: forward(program, batch)))
        if not program.calls:
            del found["exported"]
            found["reason"] = "the forward of run.evaluate does not call the model that it is given"
    except Exception as error:  # the script's forward may use anything of a model that a program does not have
        lines = str(error).strip().splitlines() or ["no reason is given"]
        found["reason"] = f"{type(error).__name__}: {lines[0]}"
    Path(request.out).write_text(json.dumps(found), encoding="utf-8")
    raise RunStopped


def _means(context: RunContext, evaluation: Evaluation) -> dict[str, float]:
    """Compute an evaluation on this process, the only one."""
    model, data, measure, forward, collate = evaluation
    with collective_pass(context, "run.evaluate", model, data, forward, collate) as outputs:
        return evaluate(outputs, measure, context.models.context)


def script_evaluates() -> bool:
    """Return whether code of this process calls a method `evaluate`: the script, its modules, or a recipe.

    Installed packages are not searched, except for the recipes.
    """
    library = Path(__file__).parents[1]
    installed = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if not path or not path.endswith(".py") or not Path(path).is_file():
            continue  # torch.ops names a file that does not exist
        recipe = Path(path).is_relative_to(library / "recipes")
        other = path.startswith(tuple(installed)) or Path(path).is_relative_to(library)
        if (recipe or not other) and ".evaluate(" in Path(path).read_text(encoding="utf-8", errors="replace"):
            return True
    return False


def evaluate_run(request: str, rank: int) -> Inspection:
    """Return an inspection that evaluates a program. `request`: a QualityRequest as text; `rank`: of this process."""
    parsed = QualityRequest.of(request)
    return Inspection(partial(StepWithoutUpdate, parsed), on_evaluate=partial(evaluate_program, parsed))
