"""Two processes: what the exact exchange costs over torch's DistributedDataParallel.

    python -m benchmarks.exchange            about seven minutes
    python -m benchmarks.exchange --quick    a smoke test

Four loops take turns (turns.py says how): ours with exchange=tree, exact; the same with messages alone, as between
hosts (on one host the processes share memory); ours with exchange=allreduce; and DistributedDataParallel as its
documentation advises (no_sync on all micro-batches but the last, gradient_as_bucket_view).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch.nn.parallel import DistributedDataParallel

from benchmarks.tasks import loss_of
from benchmarks.turns import Course, Race, Turn, main, ours


def ddp(course: Course) -> Iterator[Turn]:
    """DistributedDataParallel averages over processes; the loss is scaled for that."""
    model = DistributedDataParallel(copy.deepcopy(course.model), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for number, micro_batches in enumerate(course.steps()):
        for left, (x, y) in micro_batches:
            weight = course.order.batch * y[0].numel()
            with model.no_sync() if left else nullcontext():
                (loss_of(model(x), y) * (course.group.size / weight)).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norm = 0.0 if number else float(torch.nn.utils.get_total_norm(grads))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield Turn(model.module, norm)


def build(course: Course, loop: str) -> Iterator[Turn]:
    match loop:
        case "DDP":
            return ddp(course)
        case "messages":
            return ours(course, course.settings, replace(course.group, neighbors={}), loop)
        case "allreduce":
            return ours(course, replace(course.settings, exchange="allreduce"), course.group, loop)
    return ours(course, course.settings, course.group, loop)


if __name__ == "__main__":
    main(Race("exchange", {"tree": "DDP", "messages": "DDP", "allreduce": "DDP"}, build), __doc__)
