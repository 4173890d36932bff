"""Reduce sharded tensors in the order of one process, for norms and sums that a script computes.

Between two steps, and after a step's rounds, `model.parameters()` and their gradients are DTensors divided by rows.
DTensor reduces each shard and adds the results, which rounds differently from one process; and `item()` of the sum
returns the local result. Here such a reduction gathers one tensor after the other, and reduces whole tensors.
torch.nn.utils.clip_grad_norm_ is made of such reductions. It sends a gradient once more; `step.update(optimizer,
clip=1.0)` does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from unisono.distributed.process_group import ProcessGroup
from unisono.torch_compat.modules import dtensor_handlers, local_tensor

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
"""Operators that are computed over whole tensors. DTensor itself gathers for `var` and `std`."""


def reduce_whole(shard: ProcessGroup) -> Callable[[], None]:
    """Compute reductions of DTensors that are divided by rows over whole tensors from now on.

    All processes of `shard` must compute them together.

    Returns:
        A function that ends this.
    """
    from torch.distributed.tensor import DTensor  # takes half a second

    handlers = dtensor_handlers()
    before = {op: handlers.get(op) for op in REDUCTIONS}

    def reduce(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        meshes: list[Any] = []

        def note_mesh(tensor: Any) -> Any:
            if by_rows(tensor):
                meshes.append(tensor.device_mesh)
            return tensor

        tree_map_only(DTensor, note_mesh, (args, dict(kwargs)))
        if not meshes:
            return by_torch(op, args, kwargs)
        args, kwargs = tree_map_only(DTensor, lambda tensor: gather(tensor, shard), (args, dict(kwargs)))
        return tree_map_only(torch.Tensor, lambda result: replicated(result, meshes[0]), op(*args, **kwargs))

    def by_torch(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Compute an operator as DTensor does without our handler."""
        own = handlers.pop(op)
        try:
            return op(*args, **kwargs)
        finally:
            handlers[op] = own

    def end() -> None:
        for op, was in before.items():
            if was is None:
                handlers.pop(op, None)
            else:
                handlers[op] = was

    handlers.update(dict.fromkeys(REDUCTIONS, reduce))
    return end


def by_rows(tensor: Any) -> bool:
    """Return whether a DTensor is divided by rows along the axis `shard`, and in no other way."""
    return tensor.device_mesh.mesh_dim_names == ("shard",) and bool(tensor.placements[0].is_shard(0))


def gather(tensor: Any, shard: ProcessGroup) -> torch.Tensor:
    """Gather a DTensor. All processes of `shard` must call this together."""
    part = local_tensor(tensor)
    if not by_rows(tensor) or shard.size == 1:
        return part
    rows = -(-len(tensor) // shard.size)
    padded = part.new_zeros(rows, *part.shape[1:])
    padded[: len(part)] = part
    gathered = padded.new_empty(shard.size * rows, *part.shape[1:])
    shard.all_gather(gathered.view(-1).view(torch.uint8), padded.view(-1).view(torch.uint8)).wait()
    return gathered[: len(tensor)]


def replicated(tensor: torch.Tensor, mesh: Any) -> torch.Tensor:
    """Wrap a tensor that all processes have computed in a DTensor, because the next operators meet DTensors."""
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
