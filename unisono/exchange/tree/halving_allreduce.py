"""Exchange and add up partial sums by recursive halving and doubling between hosts (plan/halving.py).

It makes the additions of tree_allreduce.py with 2 log2(H) messages a bucket in place of 2 (H - 1), where hosts hold
equal parts of the tree. The stages of a bucket, one bucket apart:

    announce    tell the processes of this host (neighbors) that our partial sums of the bucket are complete
    0           add up what this host holds of our region; exchange halves with the first partner
    1 .. K - 1  add up the half that has arrived to the one that was kept; exchange halves of that with the next partner
    K           add up the last part and divide it by the weight; exchange totals with the last partner
    .. 2 K - 1  exchange twice as many totals with the partner before
    2 K         write the totals of our region to the memory of neighbors

Partial sums are kept until totals are written: each half that arrives has memory of its own, together one region. Two
buckets in turn use that memory. A bucket reaches a stage before a later bucket does, so that it is free again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from unisono.distributed.process_group import Message, PreparedMessages, ProcessGroup, Work, wait_for
from unisono.exchange.buckets import BucketLayout
from unisono.exchange.gradient_accumulation import FlatGradient
from unisono.exchange.tree.staged_allreduce import StagedAllReduce, add_in_order
from unisono.plan.halving import Halving
from unisono.plan.reduction_tree import Plan

IN_TURN = 2
"""Buckets that have memory for halves at the same time."""


class HalvingAllReduce(StagedAllReduce):
    """Halve and double along the tree.

    Args:
        plan: Which process holds which partial sums.
        layout: The buckets.
        group: The processes that exchange gradients.
        halving: The rounds of this process under the plan.
    """

    def __init__(self, plan: Plan, layout: BucketLayout, group: ProcessGroup, halving: Halving) -> None:
        super().__init__(plan, layout, group)
        self.halving, self.count = halving, halving.count
        self.memory.follow(plan, halving.regions)
        lengths = list(map(self.memory.chunk_length, range(len(layout.buckets))))
        self._rounds = [halving.rounds(length) for length in lengths]
        self._halves: dict[tuple[int, torch.dtype, torch.device], torch.Tensor] = {}
        for number, (b, length) in enumerate(zip(layout.buckets, lengths, strict=True)):
            key = number % IN_TURN, b.dtype, b.device
            if key not in self._halves or self._halves[key].numel() < length:
                self._halves[key] = torch.empty(length, dtype=b.dtype, device=b.device)
        halves, doublings = range(1, self.count), reversed(range(self.count - 1))
        self._stages: list[Callable[[int], None]] = [
            self._add_up_host,
            *(partial(self._halve, k=k) for k in halves),
            self._make_total,
            *(partial(self._double, k=k) for k in doublings),
            self._spread_totals,
        ]
        self.lag = len(self._stages)

    def follow(self, plan: Plan) -> bool:
        """Return False: the rounds belong to one plan."""
        return False

    def _forget_works(self) -> None:
        self._works: list[list[Work]] = []  # of the latest stage of each bucket
        self._held: list[torch.Tensor] = []  # what each bucket has added up so far

    def prepare(self, roots: Sequence[FlatGradient | None], result: FlatGradient) -> None:
        self.memory.offer(roots, result)

    def _first_messages(self, bucket: int) -> Sequence[tuple[PreparedMessages, list[list[Work]]]]:
        neighbors = self.memory.neighbors
        if not neighbors:
            return [(self._prepare_first_halves(bucket), self._works)]
        done = [Message(self.ready, other) for other in neighbors]
        sends, receives = (done, done) if bucket else self.memory.names()
        if self._carries_weights(bucket):
            rows = [self.row[slice(*span)] for span in self.plan.spans]
            sends = sends + [Message(rows[self.rank], other) for other in neighbors]
            receives = receives + [Message(rows[other], other) for other in neighbors]
        return [(self.group.prepare_messages(sends, receives), self._works)]

    def _advance(self, bucket: int) -> None:
        behind = 1 if self.memory.neighbors else 0  # else stage 0 is a part of the announcement
        for number in range(max(0, bucket - self.lag), len(self._works)):
            stage = bucket - number - behind
            if stage < len(self._stages):
                self._stages[stage](number)

    def _last_works(self) -> Iterable[Work]:
        return [work for works in self._works for work in works]

    def _start(self, bucket: int, messages: PreparedMessages) -> None:
        self._works[bucket] = messages.wrap([start() for start in messages.starts])

    def _wait(self, bucket: int) -> None:
        works, self._works[bucket] = self._works[bucket], []  # a message of gloo must not be waited for twice
        wait_for(works)

    def _half(self, bucket: int, k: int) -> torch.Tensor:
        """Return where the half of round k arrives."""
        info, rounds = self.layout.buckets[bucket], self._rounds[bucket]
        buffer = self._halves[bucket % IN_TURN, info.dtype, info.device]
        start = sum(r.kept.stop - r.kept.start for r in rounds[:k])
        return buffer[start : start + rounds[k].kept.stop - rounds[k].kept.start]

    def _add_up_host(self, bucket: int) -> None:
        self._wait(bucket)
        if bucket == 0:
            self.memory.open()
        self._start(bucket, self._prepare_first_halves(bucket))

    def _prepare_first_halves(self, bucket: int) -> PreparedMessages:
        """Add up what this host holds of our region, and build the messages with its halves."""
        routes = self.halving.routes
        terms = [self.memory.partial_sum(*place, bucket, self.rank) for place in routes.holders(routes.host)]
        pairs, left, _ = routes.on_host(routes.host)
        add_in_order(terms, pairs)
        self._held.append(terms[left[0]])
        return self._prepare_halves(bucket, 0)

    def _prepare_halves(self, bucket: int, k: int) -> PreparedMessages:
        """Build the messages of round k: the half that the partner keeps leaves, and ours arrives."""
        now, held = self._rounds[bucket][k], self._held[bucket]
        sent, self._held[bucket] = _divide(held, now.kept, now.sent)
        sends, receives = [Message(sent, now.partner)], [Message(self._half(bucket, k), now.partner)]
        if self._carries_weights(bucket):
            sends.append(Message(self.row[slice(*now.known)], now.partner))
            receives.append(Message(self.row[slice(*now.learned)], now.partner))
        return self.group.prepare_messages(sends, receives)

    def _halve(self, bucket: int, k: int) -> None:
        """Add up what arrived in round k - 1, and start round k."""
        self._wait(bucket)
        arrived = self._half(bucket, k - 1)
        left, right = self._operands(bucket, k - 1, arrived)
        self._held[bucket] = torch.add(left, right, out=arrived)
        self._start(bucket, self._prepare_halves(bucket, k))

    def _operands(self, bucket: int, k: int, arrived: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        held = self._held[bucket]
        return (held, arrived) if self._rounds[bucket][k].is_left else (arrived, held)

    def _make_total(self, bucket: int) -> None:
        self._wait(bucket)
        if bucket == 0 and not self.memory.neighbors:
            self.memory.open()
        if self.divisor is None:
            self.divisor = self._total_weight()
        last = self._rounds[bucket][-1]
        operands = self._operands(bucket, self.count - 1, self._half(bucket, self.count - 1))
        self._reduce_in_order(list(operands), [(0, 1)], self.divisor, [self._total(bucket)[last.kept]])
        self._double(bucket, self.count - 1)

    def _total(self, bucket: int) -> torch.Tensor:
        """Return where this process gathers the totals of its region."""
        return self.memory.total(self.rank, bucket, self.rank)

    def _double(self, bucket: int, k: int) -> None:
        """Exchange the totals that this process has, with its partner of round k."""
        self._wait(bucket)
        now, total = self._rounds[bucket][k], self._total(bucket)
        sends, receives = [Message(total[now.kept], now.partner)], [Message(total[now.sent], now.partner)]
        self._start(bucket, self.group.prepare_messages(sends, receives))

    def _spread_totals(self, bucket: int) -> None:
        self._wait(bucket)
        for rank in self.memory.neighbors:
            self.memory.total(rank, bucket, self.rank).copy_(self._total(bucket))
        done = [Message(self.ready, other) for other in self.memory.neighbors]
        self._start(bucket, self.group.prepare_messages(done, done))


def _divide(held: torch.Tensor, kept: slice, sent: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sent and the kept half of `held`, whose elements are those of the two slices."""
    half = len(held) // 2
    return (held[half:], held[:half]) if kept.start < sent.start else (held[:half], held[half:])
