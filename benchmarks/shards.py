"""Compare the exact sums on two processes that share one model with FSDP2.

    python -m benchmarks.shards            about seven minutes
    python -m benchmarks.shards --quick    a smoke test

Five loops alternate (see turns.py): ours with parallel.reshard=layer and step; FSDP2 by hand in the same two ways
("layer" gathers and reduces for each micro-batch, "step" gathers before the first and reduces after the last); and
FSDP2 by hand with gradients reduced in float64, which also makes sums independent of the number of processes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import torch

from benchmarks.tasks import loss_of
from benchmarks.turns import Comparison, LoopContext, LoopStep, main, ours
from unisono.config import ParallelSettings

BASELINES = {"layer": "layer by hand", "step": "step by hand", "float64": "step by hand"}


def by_hand(context: LoopContext, *, by_layer: bool, dtype: torch.dtype | None = None) -> Iterator[LoopStep]:
    """Train with FSDP2. It averages over processes in `dtype`, and the loss is scaled accordingly."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    from unisono.parallel.fsdp.fsdp import layers_of

    policy, size = MixedPrecisionPolicy(reduce_dtype=dtype), context.group.size
    mesh = init_device_mesh("cpu", (size,))
    model = copy.deepcopy(context.model)
    for module in [*layers_of(model), model]:
        fully_shard(module, mesh=mesh, reshard_after_forward=by_layer, mp_policy=policy)
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for number, micro_batches in enumerate(context.steps()):
        for left, (x, y) in micro_batches:
            model.set_requires_gradient_sync(by_layer or not left)
            model.set_reshard_after_backward(by_layer or not left)
            (loss_of(model(x), y) * (size / (context.order.batch * y[0].numel()))).backward()
        norm = 0.0 if number else total_norm(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield LoopStep(model, norm)


def total_norm(model: torch.nn.Module) -> float:
    """Return the norm of sharded gradients."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return float(norm.full_tensor())  # type: ignore[attr-defined]


def build(context: LoopContext, loop: str) -> Iterator[LoopStep]:
    if loop in ("layer", "step"):
        parallel = ParallelSettings(shard=context.group.size, reshard="layer" if loop == "layer" else "step")
        return ours(context, replace(context.settings, parallel=parallel), context.group, loop)
    return by_hand(context, by_layer=loop == "layer by hand", dtype=torch.float64 if loop == "float64" else None)


if __name__ == "__main__":
    main(Comparison("shards", BASELINES, build), __doc__)
