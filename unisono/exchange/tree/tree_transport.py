"""How partial sums meet: for one placement, who tells whom what about every bucket, and the sums over what that brings.

Between hosts, chunks travel as messages. Neighbours (distributed/shared_memory.py) need not send them: each reads its
chunk where the others have it and writes the sum where they want it; their messages say where that is, and when it is
there:

    process 0   [ a0 | a1 ]  "it is there"   reads b0, writes m0 here and there   "done"   [ m0 | m1 ]
    process 1   [ b0 | b1 ]  "it is there"   reads a1, writes m1 here and there   "done"   [ m0 | m1 ]

Nobody else reads or writes chunk c of a bucket between c's two messages, and nobody uses a bucket before all have said
that they are done. After a failure, nobody may use it before all have said that they have left the step. Whoever begins
to add up leaves a mark in all the memory that he is about to write to: so it is known there whether a partial sum is
still one, even if he dies a moment later.

All processes post the same messages in the same order: about the partial sums of bucket 0, of bucket 1, the sum of
bucket 0, the partial sums of bucket 2, the sum of bucket 1, and so on; with the first go the weights to divide by.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch

from unisono.distributed.process_group import Message, ProcessGroup, Work, wait_for
from unisono.distributed.shared_memory import SharedName, map_shared_memory
from unisono.exchange.base import Weights
from unisono.exchange.buckets import BucketLayout, FlatGradient, blocks, finite
from unisono.plan.reduction_tree import Plan

IN_FLIGHT = 2
"""Buckets whose partial sums are on their way at the same time: one is added up while the other travels."""

ZEROS = SharedName(-1, -1)
"""What a process calls a partial sum of nothing."""


class _PendingSend(NamedTuple):
    """A bucket whose partial sums are under way."""

    number: int
    parts: list[torch.Tensor | None]  # our chunk of each, in the order of the plan's arrivals; None: a neighbour has it
    chunks: torch.Tensor  # [size, chunk]: where the sum is gathered here
    works: list[Work]


class TreeTransport:
    """The messages of every bucket for one placement, and the sums over what they bring."""

    def __init__(self, plan: Plan, layout: BucketLayout, group: ProcessGroup) -> None:
        self.layout, self.group, self.rank = layout, group, group.rank
        self.neighbours = group.neighbors
        self.others = [(group.rank + i) % plan.size for i in range(1, plan.size)]
        self.far = [rank for rank in self.others if rank not in self.neighbours]
        self.arrived: dict[tuple[int, torch.dtype, torch.device], torch.Tensor] = {}
        self.row = torch.zeros(plan.leaves, dtype=torch.float64, device=group.device)
        self.ready = torch.zeros(1, dtype=torch.uint8)  # that partial sums are ready: nobody reads more from it
        self.seen: dict[tuple[int, int], list[torch.Tensor]] = {}  # neighbours' memory, bucket by bucket
        self.marks: dict[tuple[int, int], torch.Tensor] = {}  # and the mark in it
        self.own: list[torch.Tensor] = []  # the marks of our own partial sums
        self.follow(plan)

    def follow(self, plan: Plan) -> None:
        """From now on partial sums are dealt like this."""
        self.plan, layout = plan, self.layout
        self.holders = [rank for rank in range(plan.size) for _ in plan.sends(rank)]  # of the partial sums, in order
        self.additions = plan.additions()
        self.foreign = sum(rank in self.far for rank in self.holders)  # partial sums that come in messages
        for number, b in enumerate(layout.buckets):
            room, needed = (number % IN_FLIGHT, b.dtype, b.device), self.foreign * (b.size // plan.size)
            if room not in self.arrived or self.arrived[room].numel() < needed:
                self.arrived[room] = torch.empty(needed, dtype=b.dtype, device=b.device)
        # what is said between neighbours: in a step's first message where the sum goes and where the partial sums lie
        self.names = {rank: torch.empty(1 + len(plan.sends(rank)), 2, dtype=torch.int64) for rank in range(plan.size)}

    def begin(self, weights: Weights, divisor: torch.Tensor | None = None) -> None:
        """`divisor`: what to divide by, if that is known already."""
        self.weights = weights
        self.divisor = divisor
        self.sent: list[_PendingSend] = []
        self.settled = 0  # buckets whose sum is made
        self.finite: list[torch.Tensor] = []  # has a block of what we made a finite sum?
        self.results: list[torch.Tensor] = []  # our chunk of every bucket
        self.works: list[Work] = []

    def send(self, bucket: int, roots: Sequence[FlatGradient | None], result: FlatGradient) -> None:
        """Everybody gets their chunk of each of our partial sums; our chunk of everybody's is on its way to us.

        `result` is where their sum is gathered: our first partial sum, of which others have their chunk before they
        send us what belongs there.
        """
        if bucket >= IN_FLIGHT:
            self._wait_for_sums()
        if bucket == 0:
            self.own = [copy.mark for copy in (result, *roots) if copy is not None]
        about, size = self.layout.buckets[bucket], self.plan.size
        chunk = about.size // size
        room = self.arrived[bucket % IN_FLIGHT, about.dtype, about.device][: self.foreign * chunk]
        # .data has a version of its own: what is written from here on is not taken for the loop's doing
        mine = [
            room.new_zeros(size, chunk) if root is None else root.flats[bucket].data.view(size, -1) for root in roots
        ]
        sends = [Message(root[other], other) for other in self.far for root in mine]
        receives: list[Message] = []
        parts: list[torch.Tensor | None] = []
        ours, theirs = iter(mine), iter(room.view(self.foreign, chunk))
        for holder in self.holders:
            if holder == self.rank:
                parts.append(next(ours)[self.rank])
            elif holder in self.neighbours:
                parts.append(None)
            else:
                parts.append(part := next(theirs))
                receives.append(Message(part, holder))
        if bucket == 0:
            if self.divisor is None:
                rows = [self.row[slice(*span)] for span in self.plan.spans]
                rows[self.rank].copy_(self.weights())
                sends += [Message(rows[self.rank], other) for other in self.others]
                receives += [Message(rows[other], other) for other in self.others]
            if self.neighbours:
                self.names[self.rank] = torch.tensor([_name(result), *map(_name, roots)])
        sends += [Message(self.ready if bucket else self.names[self.rank], other) for other in self.neighbours]
        receives += [Message(self.ready if bucket else self.names[other], other) for other in self.neighbours]
        chunks = result.flats[bucket].data.view(size, -1)
        self.sent.append(_PendingSend(bucket, parts, chunks, self.group.send_and_receive(sends, receives)))

    def finish(self) -> bool:
        """The sums are where `send` was told to put them; is all that we made of them finite?"""
        while self.settled < len(self.sent):
            self._wait_for_sums()
        wait_for(self.works)
        self.sent, self.works = [], []  # gloo's hold its connections: a forked loader worker would close them, and hang
        return bool(torch.stack(self.finite).all()) or all(map(finite, self.results))

    def _wait_for_sums(self) -> None:
        """Of the oldest bucket under way: wait for its partial sums, add them up, hand everybody our chunk of it."""
        bucket, parts, chunks, works = self.sent[self.settled]
        self.settled += 1
        wait_for(works)
        if self.divisor is None:
            self.divisor = reduce(torch.add, self.row)
        near = {rank: self._look(rank, bucket) for rank in self.neighbours}
        if bucket == 0:
            for mark in self.own:
                mark.fill_(1)
        outs = [chunks[self.rank], *(memory.pop(0) for memory in near.values())]
        whole = [near[h].pop(0) if part is None else part for part, h in zip(parts, self.holders, strict=True)]
        self._reduce_in_order(whole, self.divisor, outs)
        sends = [Message(chunks[self.rank], other) for other in self.far]
        receives = [Message(chunks[other], other) for other in self.far]
        sends += [Message(self.ready, other) for other in self.neighbours]
        receives += [Message(self.ready, other) for other in self.neighbours]
        self.works += self.group.send_and_receive(sends, receives)

    def _look(self, rank: int, bucket: int) -> list[torch.Tensor]:
        """Our chunk of a bucket as a neighbour holds it: where the sum goes, then of each of its partial sums."""
        about, found = self.layout.buckets[bucket], []
        for name in map(SharedName._make, self.names[rank].tolist()):
            if name == ZEROS:
                found.append(torch.zeros(about.size // self.plan.size, dtype=about.dtype))
                continue
            key = rank, name.number
            if key not in self.seen:
                memory = map_shared_memory(self.neighbours[rank], name, self.layout.bytes_shared)
                self.seen[key], self.marks[key] = self.layout.cut(memory), self.layout.mark_of(memory)
            if bucket == 0:
                self.marks[key].fill_(1)
            found.append(self.seen[key][bucket].view(self.plan.size, -1)[self.rank])
        return found

    def _reduce_in_order(self, parts: list[torch.Tensor], divisor: torch.Tensor, outs: list[torch.Tensor]) -> None:
        """The plan's total over the divisor, to all of `outs`, ours first. A block at a time, while that is in the
        cache. The parts are ours to write: nobody else reads this chunk of them."""
        self.results.append(outs[0])
        for stretch in blocks(outs[0]):
            block, (result, *others) = [part[stretch] for part in parts], [out[stretch] for out in outs]
            for i, j in self.additions[:-1]:
                block[i].add_(block[j])
            for i, j in self.additions[-1:]:  # the last sum is the total: no need to write it twice
                torch.add(block[i], block[j], out=result).div_(divisor)
            if not self.additions:
                torch.div(block[0], divisor, out=result)
            self.finite.append(torch.isfinite(result.sum()))
            for other in others:
                other.copy_(result)


def _name(copy: FlatGradient | None) -> SharedName:
    """What neighbours open it by."""
    if copy is None:
        return ZEROS
    assert copy.memory is not None
    return copy.memory.name
