"""Spare rounds: compute a virtual rank once more, with nothing of it counted.

The script's loop gets the micro-batches of one virtual rank again, before or after the rounds of a step. The step's
sums, buffers, exchange and the gradients in `p.grad` stay as they are. Hooks see what the backward passes give.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from unisono import phases
from unisono.plan.batch_order import MicroBatchId
from unisono.train.batches.batch_source import BatchSource
from unisono.train.gradient_pass import GradientPass
from unisono.train.guarantees.loop_checks import LoopChecks
from unisono.train.modules.models import Models
from unisono.train.step_state import StepState

Fetch = Callable[[MicroBatchId], Any]
"""Return the batch of a micro-batch."""


class SpareRounds(NamedTuple):
    """Compute virtual ranks of a step once more."""

    source: BatchSource
    models: Models
    checks: LoopChecks

    def rounds(
        self, step: StepState, gradient: GradientPass, virtual_rank: int, fetch: Fetch | None = None
    ) -> Iterator[Any]:
        """Yield every micro-batch of a virtual rank of this step.

        Each round starts from the buffers with which the step's own rounds start. Afterward `p.grad` holds what these
        rounds gave, until the caller restores the step's gradients.

        Args:
            step: the step.
            gradient: of the step's first pass.
            virtual_rank: the virtual rank.
            fetch: returns a batch; by default it is fetched from the data set, in this process.
        """
        models, fetch = self.models, fetch or self.source.fetch
        bounds = self.source.order.micro_bounds(step.number, virtual_rank)
        stage, busy = step.stage, models.busy
        step.stage, models.busy = "walking", True
        models.buffers.begin(virtual_rank)
        models.buffers.enter(virtual_rank, spare=True)
        try:
            for number in range(len(bounds)):
                phases.enter("data")
                place = MicroBatchId(step.number, virtual_rank, number, spare=True)
                batch = fetch(place)
                step.place, step.ready = place, True
                phases.position.virtual_rank = virtual_rank
                phases.enter("forward")
                with self.checks.round_context(place, gradient):
                    yield batch
        finally:
            step.place, step.ready, step.stage, models.busy = None, False, stage, busy
            phases.position.virtual_rank = None
            phases.enter("other")
            models.buffers.leave()

    def gradients(
        self, step: StepState, gradient: GradientPass, virtual_rank: int
    ) -> Generator[Any, None, list[torch.Tensor | None]]:
        """Yield spare rounds, and return the gradient that they gave each parameter of `gradient.leaves`."""
        with gradients_aside(gradient):
            yield from self.rounds(step, gradient, virtual_rank)
            return [p.grad for p in gradient.leaves]


@contextmanager
def gradients_aside(gradient: GradientPass) -> Iterator[None]:
    """Remove every `p.grad` within this block, and restore it afterward."""
    params = list({id(p): p for p in [*gradient.leaves, *gradient.params]}.values())
    held = [p.grad for p in params]
    for p in params:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in zip(params, held, strict=True):
            p.grad = grad
