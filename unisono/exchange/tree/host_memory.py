"""The gradients in the memory of the processes of one host, which read and write each other's.

A process says first where its memory is: the names of the memory for the sum and of each of its partial sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from unisono.distributed.process_group import Message
from unisono.distributed.shared_memory import SharedName, map_shared_memory
from unisono.exchange.buckets import ALIGN, BucketLayout
from unisono.exchange.gradient_accumulation import FlatGradient
from unisono.plan.reduction_tree import Plan

ZEROS = SharedName(-1, -1)
"""The name that stands for a partial sum of zeros, which has no memory."""


class _Gradient(NamedTuple):
    """A gradient in the memory of a process of this host."""

    flats: Sequence[torch.Tensor]
    """Its buckets."""
    mark: torch.Tensor
    """See BucketLayout.mark_of."""


class HostMemory:
    """The sums and partial sums of this process and of its neighbors.

    Args:
        layout: The buckets.
        neighbors: {rank: process id} of the other processes of this host.
        rank: This process.
    """

    def __init__(self, layout: BucketLayout, neighbors: Mapping[int, int], rank: int) -> None:
        self.layout, self.neighbors, self.rank = layout, neighbors, rank
        self._chunks: list[list[slice]] = []  # of each bucket
        self._mapped: dict[tuple[int, int], _Gradient] = {}
        self._held: dict[int, list[_Gradient | None]] = {}  # of each rank: the sum, then the partial sums; None: zeros
        self._names: dict[int, torch.Tensor] = {}

    def follow(self, plan: Plan, chunks: Callable[[int, int], list[slice]]) -> None:
        """Use other partial sums and chunks from now on.

        Args:
            plan: Which process holds which partial sums.
            chunks: chunks(length, unit) returns the chunk of each rank of a bucket of this length.
        """
        ranks = (self.rank, *self.neighbors)
        self._names = {rank: torch.empty(1 + len(plan.sends(rank)), 2, dtype=torch.int64) for rank in ranks}
        self._chunks = [chunks(bucket.size, ALIGN) for bucket in self.layout.buckets]

    def chunk_length(self, bucket: int) -> int:
        """Return the number of elements of our own chunk of a bucket."""
        chunk = self._chunks[bucket][self.rank]
        return int(chunk.stop - chunk.start)

    def offer(self, roots: Sequence[FlatGradient | None], result: FlatGradient) -> None:
        """Let neighbors read and write these gradients of this process in this step.

        Args:
            roots: The partial sums, in the plan's order; None: zeros.
            result: Where the sum is gathered.
        """
        self._held = {self.rank: [None if g is None else _Gradient(g.flats, g.mark) for g in (result, *roots)]}
        if self.neighbors:
            self._names[self.rank] = torch.tensor([_name(result), *map(_name, roots)])

    def names(self) -> tuple[list[Message], list[Message]]:
        """Return the messages with the names of memory: those to send, and those to receive."""
        sends = [Message(self._names[self.rank], other) for other in self.neighbors]
        return sends, [Message(self._names[other], other) for other in self.neighbors]

    def open(self) -> None:
        """Open the memory of the neighbors, whose names have arrived. Mark all memory that may be written to."""
        for rank in self.neighbors:
            self._held[rank] = [self._map(rank, name) for name in map(SharedName._make, self._names[rank].tolist())]
        for gradients in self._held.values():
            for gradient in gradients:
                if gradient is not None:
                    gradient.mark.fill_(1)

    def _map(self, rank: int, name: SharedName) -> _Gradient | None:
        if name == ZEROS:
            return None
        key = rank, name.number
        if key not in self._mapped:
            memory = map_shared_memory(self.neighbors[rank], name, self.layout.bytes_shared)
            self._mapped[key] = _Gradient(self.layout.cut(memory), self.layout.mark_of(memory))
        return self._mapped[key]

    def total(self, rank: int, bucket: int, chunk: int) -> torch.Tensor:
        """Return where a process of this host gathers a chunk of the sum."""
        return self._chunk(self._held[rank][0], bucket, chunk)

    def partial_sum(self, rank: int, index: int, bucket: int, chunk: int) -> torch.Tensor:
        """Return a chunk of a partial sum of a process of this host; new zeros if it has no memory."""
        return self._chunk(self._held[rank][1 + index], bucket, chunk)

    def _chunk(self, gradient: _Gradient | None, bucket: int, chunk: int) -> torch.Tensor:
        info, place = self.layout.buckets[bucket], self._chunks[bucket][chunk]
        if gradient is None:
            return torch.zeros(place.stop - place.start, dtype=info.dtype, device=info.device)
        # .data has a version counter of its own: writes from here on are not mistaken for changes by the user's loop
        return gradient.flats[bucket].data[place]


def _name(copy: FlatGradient | None) -> SharedName:
    """Return the name under which neighbors open a gradient's memory."""
    if copy is None:
        return ZEROS
    assert copy.memory is not None
    return copy.memory.name
