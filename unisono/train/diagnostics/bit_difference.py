"""The difference of two tensors: its elements, and its bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from unisono.distributed.process_group import to_local
from unisono.tensors.spec import as_bytes


class BitDifference(NamedTuple):
    """The difference of two tensors of one shape: the number of different elements, the first one, and its bits."""

    elements: int
    of: int
    place: tuple[int, ...]
    mine: float
    right: float
    bits: Sequence[int]
    """The bits in which the first element differs. Bit 0 is the lowest."""

    def __str__(self) -> str:
        where = f"[{', '.join(map(str, self.place))}]"
        flipped = f"bit {self.bits[0]} of it" if len(self.bits) == 1 else f"{len(self.bits)} bits of it"
        return (
            f"{self.elements} of {self.of} elements, the first at {where}: {self.mine:g} instead of {self.right:g} "
            f"({flipped})"
        )


def bit_difference(mine: torch.Tensor, right: torch.Tensor) -> BitDifference | None:
    """Return how `mine` differs from `right`, of the same shape and dtype (not complex); None if it does not."""
    size = mine.element_size()
    one, other = (as_bytes(to_local(t.detach())).cpu().view(-1, size) for t in (mine, right))
    differs = (one != other).any(1)
    if not bool(differs.any()):
        return None
    first = int(differs.nonzero()[0])
    flipped = [int(a) ^ int(b) for a, b in zip(one[first].tolist(), other[first].tolist(), strict=True)]
    bits = [8 * byte + bit for byte, x in enumerate(flipped) for bit in range(8) if x >> bit & 1]
    shape = to_local(mine).shape
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(first), shape)) if shape else ()
    value, wanted = (float(to_local(t.detach()).reshape(-1)[first]) for t in (mine, right))
    return BitDifference(int(differs.sum()), len(differs), place, value, wanted, bits)
