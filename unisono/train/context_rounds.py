"""The rounds of a step when several processes share its sequences: each sees its slice, under numbers of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from unisono.data.rng import preserve_rng, seed_everything
from unisono.errors import LoopError
from unisono.plan.batch_order import MicroBatchId
from unisono.plan.rng_keys import ROUND, micro_batch_key, mix
from unisono.train.modules.buffer_sync import versions

if TYPE_CHECKING:
    from unisono.train.loop import StepLoop

Round = tuple[MicroBatchId, Any, bool]


def context_rounds(engine: StepLoop, rounds: Iterator[Round], number: int) -> Iterator[Round]:
    """The rounds of pass `number`, each with this process's slice of its batch.

    Dropout must not hide the same places of every slice, so a round's random numbers are keyed by the slice as well.
    What was drawn while the batch was fetched is the same on all of them; and so is what comes after a round, where
    there is one stream of random numbers (one virtual rank).
    """
    context, one_stream = engine.models.context, engine.order.virtual_ranks == 1
    device = engine.group.device if engine.group.device.type != "cpu" else None
    buffers = [b for model in engine.models.modules for b in model.buffers()]
    before = versions(buffers)
    for place, batch, last in rounds:
        key = micro_batch_key(mix(engine.order.seed, ROUND), *place[:3])
        with preserve_rng(engine.group.device) if one_stream else nullcontext(), context.part(batch) as part:
            seed_everything(mix(key, number, context.group.rank), device)
            yield place, part, last
    if any(engine.models.buffers.flags.values()) or versions(buffers) != before:
        raise LoopError(
            f"The forward pass of a step changed buffers, with parallel.context = {context.group.size}.",
            "Each process has seen a slice of the sequences, and makes something else of them.",
            "make them before the loop (a mask, a table), change them between two steps, or --set parallel.context=1",
        )
