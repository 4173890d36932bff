"""PowerSGD: approximate each gradient matrix by two thin ones (Vogels et al., arXiv 1905.13727, algorithm 1).

M [n, m] is the gradient of a node plus its residual; Q [m, rank] is the same on all processes:

    each node           P = M Q             [n, rank]     summed by the tree
    each process        orthogonalize P                   one Gram-Schmidt, in float64
    each node           Q = M' P            [m, rank]     summed by the tree
    each process        P Q' approximates the sum; each node keeps the residual M - P (its own Q)'

It is linear: the sum of the nodes' P is the P of their sum. So a process adds up its nodes before it sends, and the
traffic does not grow with their number. The next step begins with this step's Q, which is one step of a power iteration
that follows the gradient as it turns; the first Q is drawn from a fixed key. Parameters that are no matrix, or too
small to save bytes, are sent as they are.
"""

from __future__ import annotations

from math import prod

import torch

from unisono.plan.rng_keys import mix

KEY = 0x506F776572
"""The key of the first Q. It is fixed, so no run's seed decides where the iteration begins."""


def shape_of(p: torch.Tensor, rank: int) -> tuple[int, int, int] | None:
    """Return (n, m, rank) of a parameter as a matrix; None if the two thin ones have more than half of its elements."""
    if p.dim() < 2 or not p.numel():
        return None
    n, m = p.shape[0], prod(p.shape[1:])
    rank = min(rank, n, m)
    return (n, m, rank) if 2 * rank * (n + m) <= n * m else None


def first_q(number: int, m: int, rank: int, device: torch.device) -> torch.Tensor:
    """Return the first Q [m, rank] of parameter `number`."""
    g = torch.Generator().manual_seed(mix(KEY, number))
    return torch.randn(m, rank, generator=g).to(device)


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """Make the columns orthogonal and of length 1, one after the other. A column that depends on others becomes 0."""
    columns: list[torch.Tensor] = []
    for column in matrix.double().unbind(1):
        size = column.norm()
        for _ in range(2):  # once leaves an error where columns are nearly parallel
            for other in columns:
                column = column - other * (other * column).sum()
        rest = column.norm()
        # below a millionth, the rest is the rounding of float32
        columns.append(torch.where(rest > 1e-6 * size, column / rest, torch.zeros_like(column)))
    return torch.stack(columns, 1).to(matrix.dtype)


def next_q(q: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Return the Q of the next step from this step's Q and the sum that it found.

    Its scale does not matter, so it is kept near 1. A column in which nothing was found keeps its old values.
    """
    size = found.abs().max()
    return torch.where(found.abs().amax(0) > 1e-9 * size, found / size, q)
