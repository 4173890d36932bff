"""The 2-norm of a gradient, the same to the bit however it lies over processes, and clipping by it.

torch.nn.utils.get_total_norm reduces a whole tensor in an order of its own, which a part of the tensor cannot repeat.
So the norm is made of rows: of a tensor [rows, ...] the norm of every row, which no other row has a say in, whoever
computes it; then one sum of their squares, in float64, over all rows of all parameters in their order. It takes as long
as torch's (one read of the gradient).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from unisono.train.whole import lies_apart
from unisono.world.collectives import local

if TYPE_CHECKING:
    from unisono.world.collectives import Group


def total_norm(grads: Sequence[torch.Tensor], shard: Group) -> float:
    """The norm of these gradients; where processes hold shards of them, all of `shard` must call it together."""
    rows = [_rows(grad, shard) for grad in grads]
    if not rows:
        return 0.0
    if any(map(lies_apart, grads)):
        rows = [shard.sum_(torch.cat([row.to(shard.device) for row in rows]))]
    return float(torch.cat(rows).square().sum().sqrt())


def _rows(grad: torch.Tensor, shard: Group) -> torch.Tensor:
    """The norm of every row, float64 [rows]; zeros for those that other processes hold."""
    mine: torch.Tensor = local(grad.detach())
    norms = rows_of(mine)
    if not lies_apart(grad):
        return norms
    rows = norms.new_zeros(len(grad))
    first = min(shard.rank * -(-len(grad) // shard.size), len(grad))
    rows[first : first + len(norms)] = norms
    return rows


def rows_of(grad: torch.Tensor) -> torch.Tensor:
    """The norm of every row of a tensor that is whole, float64; of one without rows, its elements' absolute values."""
    norms = grad.abs().reshape(-1) if grad.dim() < 2 else torch.linalg.vector_norm(grad.flatten(1), dim=1)
    return norms.double()


def clip_(grads: Sequence[torch.Tensor], limit: float, norm: float) -> None:
    """Scale the gradients, in place, so that their norm is at most `limit`: torch.nn.utils.clip_grad_norm_'s way."""
    scale = limit / (norm + 1e-6)
    if scale < 1.0 and grads:
        torch._foreach_mul_([local(grad) for grad in grads], scale)
