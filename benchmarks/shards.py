"""Two processes that share one model: what the exact sums cost over FSDP2 as it comes.

    python -m benchmarks.shards            about seven minutes
    python -m benchmarks.shards --quick    a smoke test

Five loops take turns (turns.py says how): ours gathered by layer and once a step; FSDP2 by hand in the same two ways
(by layer: gathered and reduced for every micro-batch; once a step: gathered before the first and reduced after the last
one), and that once more with gradients reduced in float64, the other way to sums that do not depend on the number of
processes. All have the same layers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import torch

from benchmarks.tasks import loss_of
from benchmarks.turns import Course, Race, Turn, main, ours
from unisono.config import ParallelSettings

BESIDE = {"layer": "layer by hand", "step": "step by hand", "float64": "step by hand"}


def by_hand(course: Course, *, by_layer: bool, dtype: torch.dtype | None = None) -> Iterator[Turn]:
    """FSDP2 averages over processes, in `dtype`; the loss is scaled for that."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    from unisono.parallel.fsdp.fsdp import layers_of

    policy, size = MixedPrecisionPolicy(reduce_dtype=dtype), course.group.size
    mesh = init_device_mesh("cpu", (size,))
    model = copy.deepcopy(course.model)
    for part in [*layers_of(model), model]:
        fully_shard(part, mesh=mesh, reshard_after_forward=by_layer, mp_policy=policy)
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for number, micro_batches in enumerate(course.steps()):
        for left, (x, y) in micro_batches:
            model.set_requires_gradient_sync(by_layer or not left)
            model.set_reshard_after_backward(by_layer or not left)
            (loss_of(model(x), y) * (size / (course.order.batch * y[0].numel()))).backward()
        norm = 0.0 if number else whole_norm(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield Turn(model, norm)


def whole_norm(model: torch.nn.Module) -> float:
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return float(norm.full_tensor())  # type: ignore[attr-defined]


def build(course: Course, loop: str) -> Iterator[Turn]:
    if loop in ("layer", "step"):
        parallel = ParallelSettings(shard=course.group.size, reshard="layer" if loop == "layer" else "step")
        return ours(course, replace(course.settings, parallel=parallel), course.group, loop)
    return by_hand(course, by_layer=loop == "layer by hand", dtype=torch.float64 if loop == "float64" else None)


if __name__ == "__main__":
    main(Race("shards", BESIDE, build), __doc__)
