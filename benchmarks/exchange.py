"""Compare the exact exchange on two processes with torch's DistributedDataParallel.

    python -m benchmarks.exchange            about seven minutes
    python -m benchmarks.exchange --quick    a smoke test

Four loops alternate (see turns.py): ours with exchange=tree; the same without shared memory, as between hosts
("messages"); ours with exchange=allreduce; and DistributedDataParallel as its documentation advises (no_sync on all
micro-batches but the last, gradient_as_bucket_view).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch.nn.parallel import DistributedDataParallel

from benchmarks.tasks import loss_of
from benchmarks.turns import Comparison, LoopContext, LoopStep, main, ours


def ddp(context: LoopContext) -> Iterator[LoopStep]:
    """Train with DistributedDataParallel. It averages over processes, and the loss is scaled accordingly."""
    model = DistributedDataParallel(copy.deepcopy(context.model), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for number, micro_batches in enumerate(context.steps()):
        for left, (x, y) in micro_batches:
            weight = context.order.batch * y[0].numel()
            with model.no_sync() if left else nullcontext():
                (loss_of(model(x), y) * (context.group.size / weight)).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norm = 0.0 if number else float(torch.nn.utils.get_total_norm(grads))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield LoopStep(model.module, norm)


def build(context: LoopContext, loop: str) -> Iterator[LoopStep]:
    match loop:
        case "DDP":
            return ddp(context)
        case "messages":
            return ours(context, context.settings, replace(context.group, neighbors={}, hosts=()), loop)
        case "allreduce":
            return ours(context, replace(context.settings, exchange="allreduce"), context.group, loop)
    return ours(context, context.settings, context.group, loop)


if __name__ == "__main__":
    main(Comparison("exchange", {"tree": "DDP", "messages": "DDP", "allreduce": "DDP"}, build), __doc__)
