"""Parts of partial sums that are added up by halving (halving_allreduce.py): where they arrive, and the additions.

A sum is used up to two stages after the round in which its parts arrive. So two buckets in turn use that memory: a
bucket reaches a stage before a later bucket does, and it is free again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from unisono.exchange.buckets import BucketLayout
from unisono.plan.halving import Merge, Operand, Round
from unisono.plan.reduction_tree import Node

IN_TURN = 2
"""Buckets that have memory for arriving parts at the same time."""


class HeldPart(NamedTuple):
    """The elements of a partial sum that this process keeps, from element `start` of the region on."""

    start: int
    values: torch.Tensor

    def at(self, elements: slice) -> torch.Tensor:
        """Return some of these elements, which are counted from the start of the region."""
        return self.values[elements.start - self.start : elements.stop - self.start]


class Arrivals(NamedTuple):
    """The memory of one addition.

    Attributes:
        left: Where parts of the left operand arrive; None: this process has all of them.
        right: The same for the right operand.
        total: Where the sum is written: over one of the operands that arrive.
    """

    left: HeldPart | None
    right: HeldPart | None
    total: HeldPart


class PartMemory:
    """The memory for arriving parts of all buckets.

    Args:
        layout: The buckets.
        rank: This process.
    """

    def __init__(self, layout: BucketLayout, rank: int) -> None:
        self._layout, self._rank = layout, rank
        self._memory: dict[tuple[int, torch.dtype, torch.device], torch.Tensor] = {}

    def reserve(self, bucket: int, rounds: Sequence[Round]) -> None:
        """Let the memory be large enough for a bucket."""
        info, key = self._layout.buckets[bucket], self._key(bucket)
        needed = sum(self._elements(merge) for now in rounds for merge in now.merges)
        if key not in self._memory or self._memory[key].numel() < needed:
            self._memory[key] = torch.empty(needed, dtype=info.dtype, device=info.device)

    def take(self, bucket: int, rounds: Sequence[Round], k: int) -> Iterator[Arrivals]:
        """Yield the memory of each addition of round k."""
        memory = self._memory[self._key(bucket)]
        first = sum(self._elements(merge) for now in rounds[:k] for merge in now.merges)
        for merge in rounds[k].merges:
            start, size = merge.kept.start, merge.kept.stop - merge.kept.start
            count = self._elements(merge) // size if size else 0
            rows = [HeldPart(start, memory[first + n * size :][:size]) for n in range(count)]
            first += count * size
            total = rows[0] if rows else HeldPart(start, memory[:0])
            left = rows.pop(0) if arrives(merge.left, self._rank) else None
            yield Arrivals(left, rows.pop(0) if arrives(merge.right, self._rank) else None, total)

    def _key(self, bucket: int) -> tuple[int, torch.dtype, torch.device]:
        info = self._layout.buckets[bucket]
        return bucket % IN_TURN, info.dtype, info.device

    def _elements(self, merge: Merge) -> int:
        """Return how many elements of memory an addition needs."""
        rows = arrives(merge.left, self._rank) + arrives(merge.right, self._rank)
        return max(rows, 1) * (merge.kept.stop - merge.kept.start)


def arrives(operand: Operand, rank: int) -> bool:
    """Return whether a part of an operand comes from another process."""
    return any(part.rank != rank for part in operand.parts)


def pieces_of(
    merge: Merge, held: Mapping[Node, HeldPart], arrivals: Arrivals, rank: int
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Yield the pieces of an addition: which elements, and the two operands of these.

    Args:
        merge: The addition.
        held: The partial sums that this process keeps a part of.
        arrivals: Where parts of other processes have arrived.
        rank: This process.
    """
    lefts = _sources(merge.left, held, arrivals.left, rank)
    rights = _sources(merge.right, held, arrivals.right, rank)
    while lefts and rights:
        (left, left_values), (right, right_values) = lefts[-1], rights[-1]
        elements = slice(max(left.start, right.start), min(left.stop, right.stop))
        yield elements, left_values.at(elements), right_values.at(elements)
        for sources in (lefts, rights):
            if sources[-1][0].stop == elements.stop:
                sources.pop()


def _sources(
    operand: Operand, held: Mapping[Node, HeldPart], arrived: HeldPart | None, rank: int
) -> list[tuple[slice, HeldPart]]:
    """Return where the parts of an operand are, the last part first."""
    found: list[tuple[slice, HeldPart]] = []
    for part in reversed(operand.parts):
        values = held[operand.node] if part.rank == rank else arrived
        assert values is not None
        found.append((part.elements, values))
    return found
