"""The 2-norm of a gradient, the same to the bit however it lies over processes, and clipping by it.

torch.nn.utils.get_total_norm reduces a whole tensor in an order of its own, which a part of the tensor cannot repeat.
So the norm is made of rows: of a tensor [rows, ...] the norm of every row, which no other row has a say in, whoever
computes it; then one sum of their squares, in float64, over all rows of all parameters in their order. It takes as long
as torch's (one read of the gradient).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from unisono.distributed.process_group import is_dtensor, to_local
from unisono.plan.reduction_tree import chain

if TYPE_CHECKING:
    from unisono.distributed.mesh import Mesh
    from unisono.distributed.process_group import ProcessGroup


Together = Callable[[str, Callable[[], float]], float]
"""Run a collective that has a name; if a process dies in it, the others run it again."""


def _once(what: str, body: Callable[[], float]) -> float:
    return body()


def total_norm(grads: Sequence[torch.Tensor], mesh: Mesh, together: Together = _once) -> float:
    """Return the 2-norm of these gradients.

    Processes that hold parts of the same parameters call it together. With parallel.tensor the parts are added in the
    order of ranks: the norm then depends on the number of parts, and not on shards or replicas.

    Args:
        grads: the gradients, or this process's parts of them.
        mesh: the process mesh.
        together: runs the collective, where `parallel.shard` needs one.
    """
    cut = [grad for grad in grads if is_sharded(grad)]
    whole = [grad for grad in grads if not is_sharded(grad)]

    def found() -> float:
        return norm_of(_squares(whole, mesh.shard), _squares(cut, mesh.shard), mesh.tensor)

    return found() if mesh.shard.size == 1 else together("The gradient's norm", found)


def norm_of(squares: float, cut: float, tensor: ProcessGroup) -> float:
    """The norm, from a sum of squares of what every process of the axis `tensor` has, and of what is cut among them."""
    if tensor.size > 1:
        squares += chain(tensor.all_gather_object(cut))
    return math.sqrt(squares)


def is_sharded(grad: torch.Tensor) -> bool:
    """Does this process hold a part of it that no other process of the axis `tensor` has?"""
    names = grad.device_mesh.mesh_dim_names if is_dtensor(grad) else ()  # type: ignore[attr-defined]
    return "tensor" in names and grad.placements[names.index("tensor")].is_shard()  # type: ignore[attr-defined]


def _squares(grads: Sequence[torch.Tensor], shard: ProcessGroup) -> float:
    """The sum of the squares of all rows, over the processes of the axis `shard`."""
    rows = [_rows(grad, shard) for grad in grads]
    if not rows:
        return 0.0
    if shard.size > 1:
        rows = [shard.sum_(torch.cat([row.to(shard.device) for row in rows]))]
    return float(torch.cat(rows).square().sum())


def _rows(grad: torch.Tensor, shard: ProcessGroup) -> torch.Tensor:
    """The norm of every row, float64 [rows]; zeros for those that other processes of the axis `shard` hold."""
    mine: torch.Tensor = to_local(grad.detach())
    norms = rows_of(mine).to(shard.device)  # a model may lie over several devices of this process
    if shard.size == 1:
        return norms
    length = _length(grad)
    rows = norms.new_zeros(length)
    first = min(shard.rank * -(-length // shard.size), length)
    rows[first : first + len(norms)] = norms
    return rows


def _length(grad: Any) -> int:
    """How many rows the processes of the axis `shard` have together."""
    names, length = grad.device_mesh.mesh_dim_names, len(grad)
    for name, size, placement in zip(names, grad.device_mesh.shape, grad.placements, strict=True):
        if name == "tensor" and placement.is_shard(0):
            length //= size  # which is even (parallel/tensor_parallel/tensor_parallel.py)
    return length


def rows_of(grad: torch.Tensor) -> torch.Tensor:
    """The norm of every row of a tensor that is whole, float64; of one without rows, its elements' absolute values.

    A row lies in one piece when its squares are added up: the order in which that is done depends on where they lie,
    and a shard does not lie as the whole parameter does, if that is stored transposed.
    """
    norms = grad.abs().reshape(-1) if grad.dim() < 2 else torch.linalg.vector_norm(grad.contiguous().flatten(1), dim=1)
    return norms.double()


def clip_(grads: Sequence[torch.Tensor], limit: float, norm: float) -> None:
    """Scale the gradients, in place, so that their norm is at most `limit`: torch.nn.utils.clip_grad_norm_'s way."""
    scale = limit / (norm + 1e-6)
    if scale < 1.0 and grads:
        torch._foreach_mul_([to_local(grad) for grad in grads], scale)
