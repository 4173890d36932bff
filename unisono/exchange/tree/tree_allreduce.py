"""Exchange partial sums between processes, bucket by bucket, and add them up in the order of the tree.

Processes on different hosts exchange chunks in messages. Processes on one host (neighbors,
distributed/shared_memory.py) read the chunks in each other's memory, and write the sums there. Their messages say only
where the memory is and when it may be read:

    process 0   [ a0 | a1 ]  "ready"   reads b0, writes m0 here and there   "done"   [ m0 | m1 ]
    process 1   [ b0 | b1 ]  "ready"   reads a1, writes m1 here and there   "done"   [ m0 | m1 ]

Between these two messages, only one process reads and writes chunk c of a bucket. A bucket is used after all processes
have said "done"; after a failure, after all have said that they have left the step. A process that is about to add up
sets a mark in every memory that it will write to. So its owner knows that a partial sum has been overwritten, even if
the writer dies a moment later.

All processes send the same sequence of messages: the partial sums of bucket 0, of bucket 1, the sum of bucket 0, the
partial sums of bucket 2, the sum of bucket 1, and so on. The first message also carries the weights to divide by.

The operations of all messages are built before the last backward (`prepare`), so an autograd hook that completes a
bucket reaches torch's isend through `send` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch

from unisono.distributed.process_group import Message, PreparedMessages, ProcessGroup, Work, wait_for
from unisono.distributed.shared_memory import SharedName, map_shared_memory
from unisono.exchange.base import Weights
from unisono.exchange.buckets import BucketLayout, blocks
from unisono.exchange.gradient_accumulation import FlatGradient
from unisono.exchange.kernels.device_kernels import kernels_for
from unisono.exchange.kernels.elementwise import are_finite
from unisono.exchange.kernels.exchange_stream import ExchangeStream
from unisono.plan.reduction_tree import Plan

IN_FLIGHT = 2
"""Buckets whose partial sums travel at the same time: one is added up while the other travels."""

ZEROS = SharedName(-1, -1)
"""The name that stands for a partial sum of zeros, which has no memory."""


class _BucketMessages(NamedTuple):
    """The messages of one bucket, and the tensors that they fill."""

    parts: list[torch.Tensor | None]
    """Our chunk of each partial sum, in the plan's order; None: it is in a neighbor's memory."""
    chunks: torch.Tensor
    """[size, chunk]: where the sum is gathered on this process."""
    partial_sums: PreparedMessages
    sums: PreparedMessages


class _NeighborMemory(NamedTuple):
    """A gradient in a neighbor's memory."""

    flats: list[torch.Tensor]
    """Its buckets."""
    mark: torch.Tensor
    """See BucketLayout.mark_of."""


class TreeAllReduce:
    """Exchange and add up the partial sums of a step under one plan.

    Args:
        plan: Which process holds which partial sums.
        layout: The buckets.
        group: The processes that exchange gradients.
    """

    def __init__(self, plan: Plan, layout: BucketLayout, group: ProcessGroup) -> None:
        self.layout, self.group, self.rank = layout, group, group.rank
        self.neighbors = group.neighbors
        self.others = [(group.rank + i) % plan.size for i in range(1, plan.size)]
        self.remote = [rank for rank in self.others if rank not in self.neighbors]
        self.row = torch.zeros(
            plan.leaves, dtype=torch.float64, device=group.device
        )  # the weights of all virtual ranks
        self.ready = torch.zeros(1, dtype=torch.uint8)  # the content of a "ready" or "done" message, which is not read
        self._receive_buffers: dict[tuple[int, torch.dtype, torch.device], torch.Tensor] = {}
        self._mapped: dict[tuple[int, int], _NeighborMemory] = {}
        self._own_marks: list[torch.Tensor] = []
        self._messages: list[_BucketMessages] = []
        self.stream = ExchangeStream(bucket.device for bucket in layout.buckets)
        self.follow(plan)

    def follow(self, plan: Plan) -> None:
        """Use another plan from now on."""
        self.stream.join()
        self.plan, layout = plan, self.layout
        self.holders = [rank for rank in range(plan.size) for _ in plan.sends(rank)]  # of each partial sum, in order
        self.additions = plan.additions()
        self.received = sum(rank in self.remote for rank in self.holders)  # partial sums that arrive in messages
        for number, b in enumerate(layout.buckets):
            key, needed = (number % IN_FLIGHT, b.dtype, b.device), self.received * (b.size // plan.size)
            if key not in self._receive_buffers or self._receive_buffers[key].numel() < needed:
                self._receive_buffers[key] = torch.empty(needed, dtype=b.dtype, device=b.device)
        # what neighbors send first: the name of the memory for the sum, then of each partial sum
        self.names = {rank: torch.empty(1 + len(plan.sends(rank)), 2, dtype=torch.int64) for rank in range(plan.size)}

    def begin(self, weights: Weights, divisor: torch.Tensor | None = None) -> None:
        """Begin a step.

        Args:
            weights: Returns the weight of each virtual rank of this process, once the last backward has begun.
            divisor: The total weight, where it is known already; then no weights are exchanged.
        """
        self.stream.join()  # a step that was broken off may still use memory
        self.weights = weights
        self.divisor = divisor
        self.error: Exception | None = None  # of a message that was sent from inside backward
        self._messages = []
        self._partial_sums: list[list[Work]] = []  # the messages of every bucket that has been sent
        self._added = 0  # buckets that have been added up
        self._sums: list[Work] = []  # the messages with the sums
        self._block_is_finite: list[torch.Tensor] = []
        self._own_chunks: list[torch.Tensor] = []  # the chunk of every bucket that this process has added up

    def prepare(self, roots: Sequence[FlatGradient | None], result: FlatGradient) -> None:
        """Build the messages of all buckets. Call it before the first `send` of a step.

        Args:
            roots: The partial sums of this process, in the plan's order; None: zeros.
            result: Where the sum is gathered. It may be the first partial sum: the others have received their chunks
                of it before they send the sums that belong there.
        """
        self._own_marks = [copy.mark for copy in (result, *roots) if copy is not None]
        if self.neighbors:
            self.names[self.rank] = torch.tensor([_name(result), *map(_name, roots)])
        self._messages = [self._prepare_bucket(bucket, roots, result) for bucket in range(len(self.layout.buckets))]

    def _prepare_bucket(
        self, bucket: int, roots: Sequence[FlatGradient | None], result: FlatGradient
    ) -> _BucketMessages:
        info, size = self.layout.buckets[bucket], self.plan.size
        buffer = self._receive_buffers[bucket % IN_FLIGHT, info.dtype, info.device]
        buffer = buffer[: self.received * (info.size // size)]
        # .data has a version counter of its own: writes from here on are not mistaken for changes by the user's loop
        own = [
            buffer.new_zeros(size, info.size // size) if root is None else root.flats[bucket].data.view(size, -1)
            for root in roots
        ]
        sends = [Message(root[other], other) for other in self.remote for root in own]
        receives: list[Message] = []
        parts: list[torch.Tensor | None] = []
        own_chunks, rows = iter(root[self.rank] for root in own), iter(buffer.view(self.received, info.size // size))
        for holder in self.holders:
            if holder == self.rank:
                parts.append(next(own_chunks))
            elif holder in self.neighbors:
                parts.append(None)
            else:
                parts.append(part := next(rows))
                receives.append(Message(part, holder))
        if bucket == 0 and self.divisor is None:
            rows_of_weights = [self.row[slice(*span)] for span in self.plan.spans]
            sends += [Message(rows_of_weights[self.rank], other) for other in self.others]
            receives += [Message(rows_of_weights[other], other) for other in self.others]
        sends += [Message(self.ready if bucket else self.names[self.rank], other) for other in self.neighbors]
        receives += [Message(self.ready if bucket else self.names[other], other) for other in self.neighbors]
        chunks = result.flats[bucket].data.view(size, -1)
        return _BucketMessages(parts, chunks, self.group.prepare_messages(sends, receives), self._prepare_sums(chunks))

    def _prepare_sums(self, chunks: torch.Tensor) -> PreparedMessages:
        """Build the messages in which each process hands its chunk of the sum to the others."""
        sends = [Message(chunks[self.rank], other) for other in self.remote]
        receives = [Message(chunks[other], other) for other in self.remote]
        sends += [Message(self.ready, other) for other in self.neighbors]
        receives += [Message(self.ready, other) for other in self.neighbors]
        return self.group.prepare_messages(sends, receives)

    def send(self, bucket: int) -> None:
        """Start to exchange the partial sums of a bucket, which are complete on this process.

        Autograd hooks call it. Where the run survives deaths, an error waits for `finish`, because the gradients that
        backward still computes are needed.
        """
        if self.error is not None:
            return
        try:
            with self.stream.block():
                if bucket >= IN_FLIGHT:
                    sums = self._add_up_next()
                    self._sums += sums.wrap([start() for start in sums.starts])
                if bucket == 0 and self.divisor is None:
                    self.row[slice(*self.plan.spans[self.rank])].copy_(self.weights())
                messages = self._messages[bucket].partial_sums
                self._partial_sums.append(messages.wrap([start() for start in messages.starts]))
        except (RuntimeError, ConnectionError) as error:
            if self.group.monitor is None:
                raise
            self.error = error

    def finish(self) -> bool:
        """Wait until the sum is whole in the `result` of `prepare`.

        Returns:
            Whether the chunks that this process has added up are finite.
        """
        try:
            if self.error is not None:
                raise self.error
            with self.stream.block():
                while self._added < len(self._partial_sums):
                    sums = self._add_up_next()
                    self._sums += sums.wrap([start() for start in sums.starts])
                wait_for(self._sums)
                is_finite = are_finite(self._block_is_finite, self._own_chunks)
        finally:
            self.stream.join()
        # gloo's works keep its connections open: a forked loader worker would close them, and hang
        self._messages, self._partial_sums, self._sums = [], [], []
        return is_finite

    def _add_up_next(self) -> PreparedMessages:
        """Add up the oldest bucket that has been sent. Return the messages with our chunk of its sum."""
        bucket = self._added
        parts, chunks, _, sums = self._messages[bucket]
        self._added += 1
        wait_for(self._partial_sums[bucket])
        if self.divisor is None:
            self.divisor = reduce(torch.add, self.row)
        shared = {rank: self._chunks_of_neighbor(rank, bucket) for rank in self.neighbors}
        if bucket == 0:
            for mark in self._own_marks:
                mark.fill_(1)
        outs = [chunks[self.rank], *(memory.pop(0) for memory in shared.values())]
        all_parts = [shared[h].pop(0) if part is None else part for part, h in zip(parts, self.holders, strict=True)]
        self._reduce_in_order(all_parts, self.divisor, outs)
        return sums

    def _chunks_of_neighbor(self, rank: int, bucket: int) -> list[torch.Tensor]:
        """Return our chunk of a bucket in a neighbor's memory: of the sum, then of each of its partial sums."""
        info, found = self.layout.buckets[bucket], []
        for name in map(SharedName._make, self.names[rank].tolist()):
            if name == ZEROS:
                found.append(torch.zeros(info.size // self.plan.size, dtype=info.dtype))
                continue
            key = rank, name.number
            if key not in self._mapped:
                memory = map_shared_memory(self.neighbors[rank], name, self.layout.bytes_shared)
                self._mapped[key] = _NeighborMemory(self.layout.cut(memory), self.layout.mark_of(memory))
            if bucket == 0:
                self._mapped[key].mark.fill_(1)
            found.append(self._mapped[key].flats[bucket].view(self.plan.size, -1)[self.rank])
        return found

    def _reduce_in_order(self, parts: list[torch.Tensor], divisor: torch.Tensor, outs: list[torch.Tensor]) -> None:
        """Write the plan's total over the divisor to all of `outs`, of which the first is our own.

        One block at a time, so that it stays in the cache. `parts` are overwritten.
        """
        self._own_chunks.append(outs[0])
        for block in blocks(outs[0]):
            terms, (result, *others) = [part[block] for part in parts], [out[block] for out in outs]
            for i, j in self.additions[:-1]:
                terms[i].add_(terms[j])
            for i, j in self.additions[-1:]:  # the last sum is the total: it is written once, divided
                is_finite = kernels_for(result).add_and_divide(terms[i], terms[j], divisor, result)
            if not self.additions:
                is_finite = torch.isfinite(torch.div(terms[0], divisor, out=result).sum())
            self._block_is_finite.append(is_finite)
            for other in others:
                other.copy_(result)


def _name(copy: FlatGradient | None) -> SharedName:
    """Return the name under which neighbors open a gradient's memory."""
    if copy is None:
        return ZEROS
    assert copy.memory is not None
    return copy.memory.name
