"""Write rare events into the timeline: the start, assignments of virtual ranks, skipped steps.

{"event": "start", "step": 0, "host": "node1", "pid": 4711, "device": "cpu", "ranks": 4, "total": 90, ...}
{"event": "assignment", "step": 0, "virtual_ranks": [2, 4]}     from this step on, this process computes 2 and 3
{"event": "death", "step": 31, "ranks": [2]}                    these ranks left the run; "join": they joined it
{"event": "skipped", "step": 12}                                the fp16 scale was too high for the gradient

The recovery of a step adds deaths and joins (unisono/train/recovery/step_recovery.py).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from unisono.train.extensions import Extension

if TYPE_CHECKING:
    from unisono.train.context import LoopParts, RunContext
    from unisono.train.step_state import StepState


class EventRecorder(Extension):
    """Write the events of this process.

    Args:
        context: The context of the run.
        parts: The parts of the loop.
    """

    def __init__(self, context: RunContext, parts: LoopParts) -> None:
        self._context, self._source = context, parts.source
        self._spans: object = None  # the assignment that was written last

    def before_step(self, step: StepState) -> None:
        spans = self._source.schedule.at(step.number)
        if spans is not self._spans:
            if self._spans is None:
                self._start(step.number)
            self._spans = spans
            self._write("assignment", step.number, virtual_ranks=list(spans[self._source.slot.span]))

    def after_step(self, step: StepState) -> None:
        if step.skipped:
            self._write("skipped", step.number)

    def _start(self, step: int) -> None:
        context = self._context
        self._write(
            "start",
            step,
            host=context.world.host,
            pid=os.getpid(),
            device=str(context.device),
            ranks=context.group.size,
            threads=torch.get_num_threads(),
            total=context.progress.last,
            samples_per_epoch=self._source.order.length,
        )

    def _write(self, event: str, step: int, **values: object) -> None:
        self._context.monitor.event({"event": event, "step": step, **values})
