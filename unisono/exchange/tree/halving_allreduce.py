"""Exchange and add up partial sums by recursive halving along the tree between hosts (plan/halving.py).

It makes the additions of tree_allreduce.py with about 2 log2(H) messages a bucket in place of 2 (H - 1). The stages of
a bucket, one bucket apart:

    announce    tell the processes of this host (neighbors) that our partial sums of the bucket are complete
    0           add up what this host holds of our region; send the parts that others keep in round 0
    1 .. K - 1  add up what has arrived for the round before; send the parts that others keep in this round
    K           add up our part of the total and divide it by the weight; send it in the first round of gathering
    .. K + G-1  send the totals that we have in the next round of gathering
    K + G       write the totals of our region to the memory of neighbors

Partial sums are kept until totals are written: what arrives has memory of its own. A sum is used up to two stages after
the round in which its parts arrive, so two buckets in turn use that memory. A bucket reaches a stage before a later
bucket does, so that it is free again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from unisono.distributed.process_group import Message, PreparedMessages, ProcessGroup, Work, wait_for
from unisono.exchange.buckets import ALIGN, BucketLayout
from unisono.exchange.gradient_accumulation import FlatGradient
from unisono.exchange.tree.staged_allreduce import StagedAllReduce, add_in_order, routes_of
from unisono.plan.halving import Halving, Merge, Operand, find_halving
from unisono.plan.reduction_tree import Node, Plan

IN_TURN = 2
"""Buckets that have memory for arriving parts at the same time."""


class _Held(NamedTuple):
    """The elements of a partial sum that this process keeps, from element `start` of the region on."""

    start: int
    values: torch.Tensor

    def at(self, elements: slice) -> torch.Tensor:
        """Return some of these elements, which are counted from the start of the region."""
        return self.values[elements.start - self.start : elements.stop - self.start]


class _Arrivals(NamedTuple):
    """The memory of one addition: where the parts of its operands arrive. The sum is written to the first of these."""

    left: _Held | None
    right: _Held | None
    total: _Held


class HalvingAllReduce(StagedAllReduce):
    """Halve along the tree, then gather.

    Args:
        halving: The rounds of this process under a plan.
        layout: The buckets.
        group: The processes that exchange gradients.
    """

    def __init__(self, halving: Halving, layout: BucketLayout, group: ProcessGroup) -> None:
        super().__init__(halving.routes.plan, layout, group)
        self._memory: dict[tuple[int, torch.dtype, torch.device], torch.Tensor] = {}
        self._use(halving)

    def follow(self, plan: Plan) -> bool:
        """Use another plan from now on. Return False if direct messages (tree_allreduce.py) suit it better."""
        halving = find_halving(routes_of(plan, self.group))
        if halving is not None:
            self.stream.join()
            self._use(halving)
        return halving is not None

    def _use(self, halving: Halving) -> None:
        self.halving, self.plan = halving, halving.routes.plan
        self.memory.follow(self.plan, halving.regions)
        lengths = list(map(self.memory.chunk_length, range(len(self.layout.buckets))))
        self._rounds = [halving.rounds(length, ALIGN) for length in lengths]
        self._gathers = [halving.gather_totals(length, ALIGN) for length in lengths]
        for number, b in enumerate(self.layout.buckets):
            key = number % IN_TURN, b.dtype, b.device
            needed = sum(self._elements(merge) for each in self._rounds[number] for merge in each.merges)
            if key not in self._memory or self._memory[key].numel() < needed:
                self._memory[key] = torch.empty(needed, dtype=b.dtype, device=b.device)
        order, self._weight_rounds = halving.gather_weights()
        self._leaf_order = torch.tensor(order, dtype=torch.int64, device=self.group.device)
        self._ordered_weights = self.row.new_empty(len(order))
        self._stages: list[Callable[[int], None]] = [
            self._add_up_host,
            *(partial(self._halve, k=k) for k in range(1, halving.count)),
            self._make_total,
            *(partial(self._gather, k=k) for k in range(1, halving.gathers)),
            self._spread_totals,
        ]
        self.lag = len(self._stages)

    def _forget_works(self) -> None:
        self._works: list[list[Work]] = []  # of the latest stage of each bucket
        self._held: list[dict[Node, _Held]] = []  # of each bucket: the partial sums that we keep a part of
        self._arrivals: list[list[_Arrivals]] = []  # of each bucket: the additions of its latest round

    def prepare(self, roots: Sequence[FlatGradient | None], result: FlatGradient) -> None:
        self.memory.offer(roots, result)

    def _first_messages(self, bucket: int) -> Sequence[tuple[PreparedMessages, list[list[Work]]]]:
        neighbors = self.memory.neighbors
        self._held.append({})
        self._arrivals.append([])
        if not neighbors:
            return [(self._prepare_first_parts(bucket), self._works)]
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

    # -- partial sums

    def _add_up_host(self, bucket: int) -> None:
        self._wait(bucket)
        if bucket == 0:
            self.memory.open()
        self._start(bucket, self._prepare_first_parts(bucket))

    def _prepare_first_parts(self, bucket: int) -> PreparedMessages:
        """Add up what this host holds of our region, and build the messages of the first round."""
        routes = self.halving.routes
        terms = [self.memory.partial_sum(*place, bucket, self.rank) for place in routes.holders(routes.host)]
        pairs, left, nodes = routes.on_host(routes.host)
        if self.halving.column:  # else we have no region
            add_in_order(terms, pairs)
            self._held[bucket] = {node: _Held(0, terms[i]) for node, i in zip(nodes, left, strict=True)}
        if self._carries_weights(bucket):
            torch.index_select(self.row, 0, self._leaf_order, out=self._ordered_weights)
        return self._prepare_round(bucket, 0)

    def _prepare_round(self, bucket: int, k: int) -> PreparedMessages:
        """Build the messages of a round: the parts that others keep leave, and those that we keep arrive."""
        held, rounds = self._held[bucket], self._rounds[bucket]
        sends = [Message(held[node].at(part.elements), part.rank) for node, part in rounds[k].sends]
        receives: list[Message] = []
        self._arrivals[bucket] = list(self._take_memory(bucket, k))
        for merge, (left, right, _) in zip(rounds[k].merges, self._arrivals[bucket], strict=True):
            for operand, memory in ((merge.left, left), (merge.right, right)):
                others = [part for part in operand.parts if part.rank != self.rank]
                receives += [Message(memory.at(part.elements), part.rank) for part in others if memory is not None]
        if self._carries_weights(bucket) and k < len(self._weight_rounds):
            now = self._weight_rounds[k]
            sends += [Message(self._ordered_weights[each], now.to) for each in now.sent]
            receives += [Message(self._ordered_weights[each], now.source) for each in now.received]
        return self.group.prepare_messages(sends, receives)

    def _arrives(self, operand: Operand) -> bool:
        """Return whether a part of this operand comes from another process."""
        return any(part.rank != self.rank for part in operand.parts)

    def _elements(self, merge: Merge) -> int:
        """Return how many elements of memory an addition needs."""
        times = self._arrives(merge.left) + self._arrives(merge.right)
        return max(times, 1) * (merge.kept.stop - merge.kept.start)

    def _take_memory(self, bucket: int, k: int) -> Iterator[_Arrivals]:
        """Yield the memory of each addition of round k."""
        info, rounds = self.layout.buckets[bucket], self._rounds[bucket]
        memory = self._memory[bucket % IN_TURN, info.dtype, info.device]
        first = sum(self._elements(merge) for each in rounds[:k] for merge in each.merges)
        for merge in rounds[k].merges:
            size, rows = merge.kept.stop - merge.kept.start, []
            for _ in range(self._elements(merge) // size if size else 0):
                rows.append(_Held(merge.kept.start, memory[first : first + size]))
                first += size
            total = rows[0] if rows else _Held(merge.kept.start, memory[:0])
            left = rows.pop(0) if self._arrives(merge.left) else None
            yield _Arrivals(left, rows.pop(0) if self._arrives(merge.right) else None, total)

    def _halve(self, bucket: int, k: int) -> None:
        """Add up what arrived in round k - 1, and start round k."""
        self._wait(bucket)
        for merge, arrivals in zip(self._rounds[bucket][k - 1].merges, self._arrivals[bucket], strict=True):
            for elements, left, right in self._operands(bucket, merge, arrivals):
                torch.add(left, right, out=arrivals.total.at(elements))
            self._held[bucket][merge.node] = arrivals.total
        self._start(bucket, self._prepare_round(bucket, k))

    def _operands(
        self, bucket: int, merge: Merge, arrivals: _Arrivals
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Yield pieces of an addition: which elements, and the two operands of these."""
        lefts = self._sources(bucket, merge.left, arrivals.left)
        rights = self._sources(bucket, merge.right, arrivals.right)
        while lefts and rights:
            (left, left_values), (right, right_values) = lefts[-1], rights[-1]
            elements = slice(max(left.start, right.start), min(left.stop, right.stop))
            yield elements, left_values.at(elements), right_values.at(elements)
            for sources in (lefts, rights):
                if sources[-1][0].stop == elements.stop:
                    sources.pop()

    def _sources(self, bucket: int, operand: Operand, arrived: _Held | None) -> list[tuple[slice, _Held]]:
        """Return where the parts of an operand are, the last part first."""
        found: list[tuple[slice, _Held]] = []
        for part in reversed(operand.parts):
            values = self._held[bucket][operand.node] if part.rank == self.rank else arrived
            assert values is not None
            found.append((part.elements, values))
        return found

    # -- totals

    def _make_total(self, bucket: int) -> None:
        self._wait(bucket)
        if bucket == 0 and not self.memory.neighbors:
            self.memory.open()
        for merge, arrivals in zip(self._rounds[bucket][-1].merges, self._arrivals[bucket], strict=True):
            if self.divisor is None:
                self.row.index_copy_(0, self._leaf_order, self._ordered_weights)
                self.divisor = self._total_weight()
            for elements, *operands in self._operands(bucket, merge, arrivals):
                self._reduce_in_order(operands, [(0, 1)], self.divisor, [self._total(bucket)[elements]])
        self._start(bucket, self._prepare_gather(bucket, 0))

    def _total(self, bucket: int) -> torch.Tensor:
        """Return where this process gathers the totals of its region."""
        return self.memory.total(self.rank, bucket, self.rank)

    def _prepare_gather(self, bucket: int, k: int) -> PreparedMessages:
        """Build the messages of a round of gathering, with the totals that this process has."""
        rounds = self._gathers[bucket]
        if not rounds:
            return self.group.prepare_messages([], [])
        now, total = rounds[k], self._total(bucket)
        sends = [Message(total[each], now.to) for each in now.sent]
        return self.group.prepare_messages(sends, [Message(total[each], now.source) for each in now.received])

    def _gather(self, bucket: int, k: int) -> None:
        self._wait(bucket)
        self._start(bucket, self._prepare_gather(bucket, k))

    def _spread_totals(self, bucket: int) -> None:
        self._wait(bucket)
        for rank in self.memory.neighbors:
            self.memory.total(rank, bucket, self.rank).copy_(self._total(bucket))
        done = [Message(self.ready, other) for other in self.memory.neighbors]
        self._start(bucket, self.group.prepare_messages(done, done))
