"""Spare rounds: the loop's body, run once more for a virtual rank, with nothing of it counted.

A loop yields the micro-batches of one virtual rank again, before or after the rounds of a step. The step's table, its
buffers, its exchange and the gradients in `p.grad` stay as they are. What the backward passes gave is seen by hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from unisono import phases
from unisono.plan.batch_order import MicroBatchId

if TYPE_CHECKING:
    from unisono.train.gradient_pass import GradientPass
    from unisono.train.step import Step

Fetch = Callable[[MicroBatchId], Any]
"""Give the batch of a place."""


def spare_rounds(step: Step, gradient: GradientPass, virtual_rank: int, fetch: Fetch | None = None) -> Iterator[Any]:
    """Yield every micro-batch of a virtual rank of this step, as spare rounds.

    fetch  where batches come from; None: fetched from the data set, in this process

    Each round starts from the buffers with which the step's own rounds start. Afterwards `p.grad` holds what these
    rounds gave, until the caller puts the step's gradients back.
    """
    engine = step._engine
    buffers = engine.models.buffers
    fetch = fetch or (lambda place: engine._loader.fetch(place)[1])
    bounds = engine.order.micro_bounds(step.number, virtual_rank)
    models, busy = engine.models, engine.models.busy
    state, step._state, models.busy = step._state, "walking", True
    buffers.begin(virtual_rank)
    buffers.enter(virtual_rank, spare=True)
    try:
        for number in range(len(bounds)):
            phases.enter("data")
            place = MicroBatchId(step.number, virtual_rank, number, spare=True)
            batch = fetch(place)
            step._place, step._ready = place, True
            phases.Position.virtual_rank = virtual_rank
            phases.enter("forward")
            with engine.round_context(place, gradient):
                yield batch
    finally:
        step._place, step._ready, step._state, models.busy = None, False, state, busy
        phases.Position.virtual_rank = None
        phases.enter("other")
        buffers.leave()


@contextmanager
def gradients_aside(gradient: GradientPass) -> Iterator[None]:
    """Take every `p.grad` away within this block, and put it back afterwards."""
    params = list({id(p): p for p in [*gradient.leaves, *gradient.params]}.values())
    held = [p.grad for p in params]
    for p in params:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in zip(params, held, strict=True):
            p.grad = grad


def computed(step: Step, gradient: GradientPass, virtual_rank: int) -> Generator[Any, None, list[torch.Tensor | None]]:
    """Run spare rounds and return the gradient that they gave each parameter of `gradient.leaves`."""
    with gradients_aside(gradient):
        yield from spare_rounds(step, gradient, virtual_rank)
        return [p.grad for p in gradient.leaves]
