"""The 2-norm of a gradient, with the same bits however it is divided among processes, and clipping by it.

torch.nn.utils.get_total_norm reduces a whole tensor in an order that a part of the tensor cannot repeat. So the norm is
computed from rows: first the norm of every row of a tensor [rows, ...], which depends on no other row; then one sum of
their squares, in float64, over all rows of all parameters in their order. It takes as long as torch's (one read of the
gradient).
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
    """Return the norm, from two sums of squares.

    Args:
        squares: of the gradients that every process of the axis `tensor` has.
        cut: of this process's part of the gradients that are divided along that axis.
        tensor: the processes of the axis `tensor`.
    """
    if tensor.size > 1:
        squares += chain(tensor.all_gather_object(cut))
    return math.sqrt(squares)


def is_sharded(grad: torch.Tensor) -> bool:
    """Return whether a gradient is divided along the axis `tensor`."""
    names = grad.device_mesh.mesh_dim_names if is_dtensor(grad) else ()  # type: ignore[attr-defined]
    return "tensor" in names and grad.placements[names.index("tensor")].is_shard()  # type: ignore[attr-defined]


def _squares(grads: Sequence[torch.Tensor], shard: ProcessGroup) -> float:
    """Return the sum of the squares of all rows, over the processes of the axis `shard`."""
    rows = [_rows(grad, shard) for grad in grads]
    if not rows:
        return 0.0
    if shard.size > 1:
        rows = [shard.sum_(torch.cat([row.to(shard.device) for row in rows]))]
    return float(torch.cat(rows).square().sum())


def _rows(grad: torch.Tensor, shard: ProcessGroup) -> torch.Tensor:
    """Return the norm of every row, float64 [rows]; 0 for rows that other processes of the axis `shard` hold."""
    mine: torch.Tensor = to_local(grad.detach())
    norms = rows_of(mine).to(shard.device)  # this process may have the model on several devices
    if shard.size == 1:
        return norms
    length = _length(grad)
    rows = norms.new_zeros(length)
    first = min(shard.rank * -(-length // shard.size), length)
    rows[first : first + len(norms)] = norms
    return rows


def _length(grad: Any) -> int:
    """Return the number of rows that the processes of the axis `shard` have together."""
    names, length = grad.device_mesh.mesh_dim_names, len(grad)
    for name, size, placement in zip(names, grad.device_mesh.shape, grad.placements, strict=True):
        if name == "tensor" and placement.is_shard(0):
            length //= size  # tensor parallelism divides evenly (parallel/tensor_parallel/tensor_parallel.py)
    return length


def rows_of(grad: torch.Tensor) -> torch.Tensor:
    """Return the norm of every row of a local tensor, float64; with fewer than two dims, the absolute values.

    A row is made contiguous before its squares are added, since the order of the sum depends on the strides. A shard
    has other strides than the whole parameter if that is stored transposed.
    """
    norms = grad.abs().reshape(-1) if grad.dim() < 2 else torch.linalg.vector_norm(grad.contiguous().flatten(1), dim=1)
    return norms.double()


def clip_(grads: Sequence[torch.Tensor], limit: float, norm: float) -> None:
    """Scale the gradients, in place, so that their norm is at most `limit`, as torch.nn.utils.clip_grad_norm_ does."""
    scale = limit / (norm + 1e-6)
    if scale < 1.0 and grads:
        torch._foreach_mul_([to_local(grad) for grad in grads], scale)
