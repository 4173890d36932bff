"""Exchange and add up partial sums by recursive halving along the tree between hosts (plan/halving.py).

It makes the additions of tree_allreduce.py with about 2 log2(H) messages a bucket in place of 2 (H - 1). The stages of
a bucket, one bucket apart:

    announce    tell the processes of this host (neighbors) that our partial sums of the bucket are complete
    0           add up what this host holds of our region; send the parts that others keep in round 0
    1 .. K - 1  add up what has arrived for the round before; send the parts that others keep in this round
    K           add up our part of the total and divide it by the weight; send it in the first round of gathering
    .. K + G-1  send the totals that we have in the next round of gathering
    K + G       write the totals of our region to the memory of neighbors

Partial sums are kept until totals are written: what arrives has memory of its own (part_memory.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from unisono.distributed.process_group import Message, PreparedMessages, ProcessGroup, Work, wait_for
from unisono.exchange.buckets import ALIGN, BucketLayout
from unisono.exchange.gradient_accumulation import FlatGradient
from unisono.exchange.tree.part_memory import Arrivals, HeldPart, PartMemory, pieces_of
from unisono.exchange.tree.staged_allreduce import StagedAllReduce, add_in_order, routes_of
from unisono.plan.halving import Halving, find_halving
from unisono.plan.reduction_tree import Node, Plan


class HalvingAllReduce(StagedAllReduce):
    """Halve along the tree, then gather.

    Args:
        halving: The rounds of this process under a plan.
        layout: The buckets.
        group: The processes that exchange gradients.
    """

    def __init__(self, halving: Halving, layout: BucketLayout, group: ProcessGroup) -> None:
        super().__init__(halving.routes.plan, layout, group)
        self._parts = PartMemory(layout, group.rank)
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
        for bucket, rounds in enumerate(self._rounds):
            self._parts.reserve(bucket, rounds)
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
        self._held: list[dict[Node, HeldPart]] = []  # of each bucket: the partial sums that we keep a part of
        self._arrivals: list[list[Arrivals]] = []  # of each bucket: the additions of its latest round

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
            self._held[bucket] = {node: HeldPart(0, terms[i]) for node, i in zip(nodes, left, strict=True)}
        if self._carries_weights(bucket):
            torch.index_select(self.row, 0, self._leaf_order, out=self._ordered_weights)
        return self._prepare_round(bucket, 0)

    def _prepare_round(self, bucket: int, k: int) -> PreparedMessages:
        """Build the messages of a round: the parts that others keep leave, and those that we keep arrive."""
        held, rounds = self._held[bucket], self._rounds[bucket]
        sends = [Message(held[node].at(part.elements), part.rank) for node, part in rounds[k].sends]
        receives: list[Message] = []
        self._arrivals[bucket] = list(self._parts.take(bucket, rounds, k))
        for merge, (left, right, _) in zip(rounds[k].merges, self._arrivals[bucket], strict=True):
            for operand, memory in ((merge.left, left), (merge.right, right)):
                others = [part for part in operand.parts if part.rank != self.rank]
                receives += [Message(memory.at(part.elements), part.rank) for part in others if memory is not None]
        if self._carries_weights(bucket) and k < len(self._weight_rounds):
            now = self._weight_rounds[k]
            sends += [Message(self._ordered_weights[each], now.to) for each in now.sent]
            receives += [Message(self._ordered_weights[each], now.source) for each in now.received]
        return self.group.prepare_messages(sends, receives)

    def _halve(self, bucket: int, k: int) -> None:
        """Add up what arrived in round k - 1, and start round k."""
        self._wait(bucket)
        for merge, arrivals in zip(self._rounds[bucket][k - 1].merges, self._arrivals[bucket], strict=True):
            for elements, left, right in pieces_of(merge, self._held[bucket], arrivals, self.rank):
                torch.add(left, right, out=arrivals.total.at(elements))
            self._held[bucket][merge.node] = arrivals.total
        self._start(bucket, self._prepare_round(bucket, k))

    # -- totals

    def _make_total(self, bucket: int) -> None:
        self._wait(bucket)
        if bucket == 0 and not self.memory.neighbors:
            self.memory.open()
        for merge, arrivals in zip(self._rounds[bucket][-1].merges, self._arrivals[bucket], strict=True):
            if self.divisor is None:
                self.row.index_copy_(0, self._leaf_order, self._ordered_weights)
                self.divisor = self._total_weight()
            for elements, *operands in pieces_of(merge, self._held[bucket], arrivals, self.rank):
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
