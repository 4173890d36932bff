"""Reductions over shards in the order of one process: norms and sums that a script computes by itself.

Between two steps, and after a step's rounds, `model.parameters()` and their gradients are DTensors divided by rows.
DTensor reduces each shard and adds the results, which rounds otherwise than one process does; and `item()` of the sum
returns the local result. Here such a reduction gathers one tensor after the other, and reduces whole tensors:
torch.nn.utils.clip_grad_norm_ is made of them. It sends a gradient once more; `step.update(optimizer, clip=1.0)` does
not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from unisono.distributed.process_group import ProcessGroup

aten = torch.ops.aten

REDUCTIONS = [
    aten.linalg_vector_norm.default,
    aten._foreach_norm.Scalar,
    aten.norm.Scalar,
    aten.norm.ScalarOpt_dim,
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.mean.default,
    aten.mean.dim,
    aten.dot.default,
    aten.max.default,
    aten.min.default,
    aten.amax.default,
    aten.amin.default,
    aten.any.default,
    aten.all.default,
]
"""Operations that are computed over whole tensors. `var` and `std` DTensor computes over whole tensors by itself."""


def reduce_whole(shard: ProcessGroup) -> Callable[[], None]:
    """From now on, compute reductions of DTensors that are divided by rows among the processes of `shard` over whole
    tensors. They must all compute them together. Returns what ends this."""
    from torch.distributed.tensor import DTensor  # half a second

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    before = {op: handlers.get(op) for op in REDUCTIONS}

    def reduce(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        meshes: list[Any] = []

        def look(tensor: Any) -> Any:
            if by_rows(tensor):
                meshes.append(tensor.device_mesh)
            return tensor

        tree_map_only(DTensor, look, (args, dict(kwargs)))
        if not meshes:
            return by_torch(op, args, kwargs)
        args, kwargs = tree_map_only(DTensor, lambda tensor: whole_of(tensor, shard), (args, dict(kwargs)))
        return tree_map_only(torch.Tensor, lambda found: replicated(found, meshes[0]), op(*args, **kwargs))

    def by_torch(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What DTensor makes of it without us."""
        ours = handlers.pop(op)
        try:
            return op(*args, **kwargs)
        finally:
            handlers[op] = ours

    def end() -> None:
        for op, was in before.items():
            if was is None:
                handlers.pop(op, None)
            else:
                handlers[op] = was

    handlers.update(dict.fromkeys(REDUCTIONS, reduce))
    return end


def by_rows(tensor: Any) -> bool:
    """Return whether a DTensor is divided by rows along the axis `shard`, and nowhere else."""
    return tensor.device_mesh.mesh_dim_names == ("shard",) and bool(tensor.placements[0].is_shard(0))


def whole_of(tensor: Any, shard: ProcessGroup) -> torch.Tensor:
    """Gather a DTensor. All processes of `shard` must call this together."""
    mine: torch.Tensor = tensor._local_tensor.detach()
    if not by_rows(tensor) or shard.size == 1:
        return mine
    rows = -(-len(tensor) // shard.size)
    padded = mine.new_zeros(rows, *mine.shape[1:])
    padded[: len(mine)] = mine
    gathered = padded.new_empty(shard.size * rows, *mine.shape[1:])
    shard.all_gather(gathered.view(-1).view(torch.uint8), padded.view(-1).view(torch.uint8)).wait()
    return gathered[: len(tensor)]


def replicated(tensor: torch.Tensor, mesh: Any) -> torch.Tensor:
    """What every process has computed, as a DTensor: it meets DTensors in the operations that come next."""
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
