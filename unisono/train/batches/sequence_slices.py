"""The rounds of a step when several processes share its sequences: each process computes its slice."""

from __future__ import annotations

from contextlib import nullcontext

from unisono.data.rng import preserve_rng, seed_everything
from unisono.errors import LoopError
from unisono.plan.batch_order import BatchOrder
from unisono.plan.rng_keys import ROUND, micro_batch_key, mix
from unisono.train.collective import Rounds
from unisono.train.extensions import Extension
from unisono.train.gradient_pass import GradientPass
from unisono.train.modules.buffer_sync import versions
from unisono.train.modules.models import Models
from unisono.train.step_state import StepState


class SequenceSlices(Extension):
    """Give each round this process's slice of its batch.

    Dropout must not hide the same positions of every slice, so a round's random numbers are keyed by the slice as well.
    What was drawn while the batch was fetched is the same on all processes that share it. So is what comes after a
    round where there is one stream of random numbers (one virtual rank).
    """

    def __init__(self, models: Models, order: BatchOrder) -> None:
        self.models, self.order = models, order

    def rounds(self, step: StepState, gradient: GradientPass, rounds: Rounds) -> Rounds:
        models, order = self.models, self.order
        device, context = models.group.device, models.context
        buffers = [b for model in models.modules for b in model.buffers()]
        before = versions(buffers)
        for place, batch, last in rounds:
            key = micro_batch_key(mix(order.seed, ROUND), *place[:3])
            with preserve_rng(device) if order.virtual_ranks == 1 else nullcontext(), context.part(batch) as part:
                seed_everything(mix(key, step.passes, context.group.rank), device if device.type != "cpu" else None)
                yield place, part, last
        if any(models.buffers.flags.values()) or versions(buffers) != before:
            raise LoopError(
                f"The forward pass of a step changed buffers, with parallel.context = {context.group.size}.",
                "Each process has seen a slice of the sequences, and makes something else of them.",
                "make them before the loop (a mask, a table), change them between two steps, or "
                "--set parallel.context=1",
            )
