"""Export the model of an earlier run as a program: run its script to the first step, and capture a call of the model.

    checkpoint --> script, on one process --> first micro-batch --> model(*args, **kwargs) --> writer of the format
                                              does not count        inputs are the example

Only the script's own code builds the model, and only its loop calls it. So the inputs of the exported program are those
of the training loop. The run itself is not touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_map_only

from unisono.errors import LoopError, RunStopped
from unisono.export.formats import ExportRequest
from unisono.export.samples import ModelCall
from unisono.export.script_evaluation import script_evaluates
from unisono.export.writers import write_program
from unisono.parallel.precision import AutocastForward
from unisono.train.batches.spare_rounds import SpareRounds, gradients_aside
from unisono.train.context import Inspection, LoopParts, RunContext
from unisono.train.extensions import Extension
from unisono.train.gradient_pass import GradientPass
from unisono.train.step_state import StepState


@dataclass
class Capture:
    """The inputs of the first call of a model; None before it."""

    call: ModelCall | None = None

    def __call__(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the inputs. It is a forward pre-hook."""
        if self.call is None:
            inputs = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), (args, kwargs))
            self.call = ModelCall(*inputs)


@contextmanager
def capturing(model: torch.nn.Module) -> Iterator[Capture]:
    """Return a block in which the first call of a model is captured."""
    capture = Capture()
    hook = model.register_forward_pre_hook(capture, with_kwargs=True)
    try:
        yield capture
    finally:
        hook.remove()


class ProgramExport(Extension):
    """Compute one virtual rank of a step, export the model with the inputs of its first call, and end the run.

    A loop with several passes, such as one of a teacher and two students, may call the model in a later one. Then the
    script computes the whole step, without updates, until a pass has called the model.

    Args:
        request: What to write.
        context: The context of the run.
        parts: The parts of its loop.
    """

    def __init__(self, request: ExportRequest, context: RunContext, parts: LoopParts) -> None:
        self._request, self._context = request, context
        self._spare = SpareRounds(parts.source, context.models, parts.checks)
        parts.sync.steps_optimizers = False
        self._later = ExitStack()
        self._capture = Capture()
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        progress = context.progress
        progress.steps_done = max(min(progress.steps_done, progress.last - 1), 0)  # a run that has ended, too
        parts.source.follow(iter([progress.steps_done]))

    @property
    def _model(self) -> torch.nn.Module:
        return self._context.state.model_named(self._request.model)

    def extra_rounds(self, step: StepState, gradient: GradientPass) -> Iterator[Any]:
        gradient.prepare()
        self._before = [(each, each.clone()) for each in self._model.buffers()]
        with capturing(self._model) as capture, gradients_aside(gradient):
            yield from self._spare.rounds(step, gradient, 0)
        if capture.call is not None:
            self._export(capture.call)
        self._before += [(each, each.detach().clone()) for each in self._model.parameters()]
        self._capture = self._later.enter_context(capturing(self._model))

    def gradient_ready(self, step: StepState, gradient: GradientPass) -> None:
        if self._capture.call is not None:
            self._export(self._capture.call)

    def step_ended(self, step: StepState) -> None:
        if self._capture.call is not None:
            self._export(self._capture.call)
        raise LoopError(
            f"The loop of the script does not call the model {type(self._model).__name__} in its first step.",
            "An export needs the inputs of a call as an example.",
            "name another model (--model NAME), or export the weights (--format safetensors).",
        )

    def _export(self, call: ModelCall) -> NoReturn:
        """Write the model as it was before the step, and end the run."""
        self._later.close()
        model = self._model
        with torch.no_grad():
            for tensor, value in self._before:
                tensor.copy_(value)
        if isinstance(model.forward, AutocastForward):
            model.forward = model.forward.forward
        write_program(self._request, model, call, script_evaluates())
        raise RunStopped


def export_run(request: str, rank: int) -> Inspection:
    """Return an inspection that exports a model. `request`: an ExportRequest as text; `rank`: of this process."""
    return Inspection(partial(ProgramExport, ExportRequest.of(request)))
