"""PowerSGD: of each matrix, what two thin ones say of it. (Vogels, Karimireddy, Jaggi, arXiv 1905.13727, algorithm 1.)

M [n, m] is the gradient of a node, with what was left over of its earlier ones; Q [m, rank] is the same everywhere:

    each node         P = M Q          [n, rank]     they are added up, by the tree
    everybody         P orthogonal     one Gram-Schmidt, in float64
    each node         Q = M' P         [m, rank]     they are added up, by the tree
    everybody         the sum's approximation is P Q'; each node keeps M - P (its own Q)'

It is linear: sums of P are P of sums, so a process adds up its nodes before it sends, and what travels does not grow
with their number. Q is where the next step begins (a step of a power iteration, which follows the gradient as it
turns); the first one is drawn under a key. What is no matrix, or too small for it to pay, travels as it is.
"""

from __future__ import annotations

from math import prod

import torch

from unisono.plan.rng_keys import mix

KEY = 0x506F776572  # whose key: no run's seed decides where the iteration begins


def shape_of(p: torch.Tensor, rank: int) -> tuple[int, int, int] | None:
    """(n, m, rank) of a parameter as a matrix; None: two thin ones are not even half as large."""
    if p.dim() < 2 or not p.numel():
        return None
    n, m = p.shape[0], prod(p.shape[1:])
    rank = min(rank, n, m)
    return (n, m, rank) if 2 * rank * (n + m) <= n * m else None


def first_q(number: int, m: int, rank: int, device: torch.device) -> torch.Tensor:
    """Where the iteration of parameter `number` begins."""
    g = torch.Generator().manual_seed(mix(KEY, number))
    return torch.randn(m, rank, generator=g).to(device)


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """Its columns, made orthogonal one after the other, of length 1; a column that depends on the others becomes 0."""
    columns: list[torch.Tensor] = []
    for column in matrix.double().unbind(1):
        size = column.norm()
        for _ in range(2):  # once leaves a rest where columns are nearly parallel
            for other in columns:
                column = column - other * (other * column).sum()
        left = column.norm()
        # of a float32 less than a millionth is its rounding
        columns.append(torch.where(left > 1e-6 * size, column / left, torch.zeros_like(column)))
    return torch.stack(columns, 1).to(matrix.dtype)


def next_q(q: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Where the next step begins, from where this one did and the sum that it found. Its size does not matter, so it
    stays near 1; a column in which nothing was found is not lost for good."""
    size = found.abs().max()
    return torch.where(found.abs().amax(0) > 1e-9 * size, found / size, q)
