"""Recursive halving along the tree: about 2 log2(H) messages between H hosts in place of 2 (H - 1).

A node of the tree is added up by the hosts that hold leaves of it, together: each keeps a part of the elements. Its
parent is added up by the hosts of both children. They divide the elements among more hosts, so each keeps less, and
sends the rest to those that keep it now. After the root each host has the totals of one part. Then it gathers the
others (plan/gather_rounds.py):

    host   holds    round 0: (0,4) and (4,6)    round 1: (0,6)              gather
    0      (0,2)    (0,4), elements 0 to 1/2    total, elements 0 to 1/3    with two hosts
    1      (2,4)    (0,4), elements 1/2 to 1    total, elements 2/3 to 1
    2      (4,6)                                total, elements 1/3 to 2/3

Every element is added up in the order of the tree. The hosts of a node are in the order of their parts. Those of a
parent are sorted by where the parts of both groups are, so a new part is near the old one, and a host sends to few
others. A power of two of hosts with equal subtrees meets one partner in each round (Thakur, Rabenseifner and Gropp,
Optimization of Collective Communication Operations in MPICH, 2005). A host with several partial sums, or a subtree
that it shares with its neighbors in the tree, takes part in the additions of each.

A node is added up in the round before its parent, so nothing is kept for longer than two rounds.

With P processes on each host, the process in place p does this for region p of P equal regions of the gradient, with
the processes in the same place on other hosts. Within a host processes read each other's memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from unisono.plan.gather_rounds import Blocks, gather_rounds
from unisono.plan.host_routes import HostRoutes
from unisono.plan.link_shares import are_unlike
from unisono.plan.reduction_tree import Node

FEWEST_HOSTS = 32
"""With fewer hosts direct messages, which have two rounds, are as quick (docs/design/growth.md). At least 2."""

Order = Sequence[int]
"""The places of the hosts that add up a node, in the order of the parts that they keep."""


class Part(NamedTuple):
    """Some elements of a partial sum.

    Attributes:
        rank: The process to which they are sent, or which has them.
        elements: Which elements of the region.
    """

    rank: int
    elements: slice


class Operand(NamedTuple):
    """One side of an addition.

    Attributes:
        node: The partial sum.
        parts: Which process has the elements that this one keeps, in their order; perhaps this process itself.
    """

    node: Node
    parts: Sequence[Part]


class Merge(NamedTuple):
    """An addition of two partial sums, for the elements that this process keeps.

    Attributes:
        node: The sum.
        kept: The elements.
        left: The left operand.
        right: The right operand.
    """

    node: Node
    kept: slice
    left: Operand
    right: Operand


class Round(NamedTuple):
    """One round of a process.

    Attributes:
        sends: The partial sums of which it sends parts, and the parts.
        merges: The additions that it makes when the parts of the others have arrived.
    """

    sends: Sequence[tuple[Node, Part]]
    merges: Sequence[Merge]


class GatherMessages(NamedTuple):
    """The messages of one round that gathers totals or weights.

    Attributes:
        to: The process to which this one sends.
        sent: What it sends.
        source: The process from which it receives.
        received: What it receives.
    """

    to: int
    sent: Sequence[slice]
    source: int
    received: Sequence[slice]


class _Shared(NamedTuple):
    """A node that this host adds up with others.

    Attributes:
        depth: The number of nodes above it.
        node: The node.
        left: The hosts of its left child.
        right: The hosts of its right child.
        order: Its hosts.
    """

    depth: int
    node: Node
    left: Order
    right: Order
    order: Order


class Halving:
    """The rounds of one process under one plan.

    Args:
        routes: The plan and the hosts, as seen from this process.
        holders: The host of each partial sum that hosts hold.
    """

    def __init__(self, routes: HostRoutes, holders: Mapping[Node, int]) -> None:
        self.routes, self.leaves = routes, routes.plan.leaves
        holding = list(dict.fromkeys(host for _, host in sorted(holders.items())))
        self.hosts = holding + sorted(set(routes.hosts) - set(holding))
        """All hosts, in the order of what they hold; those that hold nothing come last."""
        self._holding, self._place = len(holding), self.hosts.index(routes.host)
        places = {host: place for place, host in enumerate(self.hosts)}
        self._held = {node: places[host] for node, host in holders.items()}
        self._shared: list[_Shared] = []
        self._deepest = 0
        order = list(self._visit(Node(0, self.leaves), 0))
        self._order = order + list(range(len(holding), len(self.hosts)))
        self.count = self._deepest + 1
        """The number of rounds."""
        self._regions = min(len(routes.ranks_on(host)) for host in self.hosts)
        row = routes.local.index(routes.rank)
        self.column = [routes.ranks_on(host)[row] for host in self.hosts] if row < self._regions else []
        """The ranks in the same place as this one on each host; empty if one of the hosts has no such rank."""

    def _visit(self, node: Node, depth: int) -> Order:
        """Return the hosts of a node, and note those nodes that this host adds up with others."""
        if node in self._held:
            return [self._held[node]]
        self._deepest = max(self._deepest, depth)
        left, right = (self._visit(child, depth + 1) for child in node.children)
        order = merge_orders(left, right)
        if self._place in order:
            self._shared.append(_Shared(depth, node, left, right, order))
        return order

    def regions(self, length: int, unit: int) -> list[slice]:
        """Return the region of each rank among `length` elements, a multiple of `unit` for each rank."""
        units = length // unit
        ends = [units * region // self._regions * unit for region in range(self._regions + 1)]
        ends += [ends[-1]] * self.routes.plan.size  # ranks without a region
        places = [self.routes.ranks_on(host).index(rank) for rank, host in enumerate(self.routes.hosts)]
        return [slice(ends[place], ends[place + 1]) for place in places]

    def rounds(self, length: int, unit: int) -> list[Round]:
        """Return the rounds for a region of `length` elements, of which each process keeps multiples of `unit`."""
        if not self.column:
            return [Round([], [])] * self.count
        found: list[Round] = [Round([], []) for _ in range(self.count)]
        for shared in sorted(self._shared, key=lambda each: each.node):
            sends: list[tuple[Node, Part]] = []
            kept = _part_of(self._place, shared.order, length, unit)
            operands = []
            for node, order in zip(shared.node.children, (shared.left, shared.right), strict=True):
                if self._place in order:
                    had = _part_of(self._place, order, length, unit)
                    sends += [(node, part) for part in self._parts(shared.order, had, length, unit)]
                operands.append(Operand(node, list(self._parts(order, kept, length, unit))))
            now = found[self.count - 1 - shared.depth]
            found[self.count - 1 - shared.depth] = Round(
                [*now.sends, *((node, part) for node, part in sends if part.rank != self.routes.rank)],
                [*now.merges, Merge(shared.node, kept, *operands)],
            )
        return found

    def _parts(self, order: Order, among: slice, length: int, unit: int) -> Iterator[Part]:
        """Yield the parts of the hosts of a node among some elements."""
        count, units = len(order), length // unit
        start, stop = among.start // unit, among.stop // unit
        first = bisect_right(range(count), start, key=lambda number: units * (number + 1) // count)
        for number in range(first, count):
            low, high = max(units * number // count, start), min(units * (number + 1) // count, stop)
            if low >= stop:
                return
            if low < high:
                yield Part(self.column[order[number]], slice(low * unit, high * unit))

    def gather_totals(self, length: int, unit: int) -> list[GatherMessages]:
        """Return the rounds that gather the totals of a region, which each process begins with its part of the root."""
        if not self.column:
            return []
        units, last = length // unit, self._holding
        ends = [units * min(number, last) // last * unit for number in range(len(self._order) + 1)]
        return _messages(self._order.index(self._place), [self.column[place] for place in self._order], ends)

    @property
    def gathers(self) -> int:
        """The number of rounds that gather totals."""
        return (len(self.hosts) - 1).bit_length()

    def gather_weights(self) -> tuple[list[int], list[GatherMessages]]:
        """Return the virtual ranks in the order of their hosts, and the rounds that gather their weights in that order.

        There are at most as many as rounds of sums.
        """
        spans = [[self.routes.plan.spans[rank] for rank in self.routes.ranks_on(host)] for host in self.hosts]
        order = [leaf for of_host in spans for span in of_host for leaf in range(*span)]
        if not self.column or self._place >= self._holding:
            return order, []
        counts = (sum(hi - lo for lo, hi in of_host) for of_host in spans[: self._holding])
        return order, _messages(self._place, self.column[: self._holding], list(accumulate(counts, initial=0)))


def _messages(place: int, ranks: Sequence[int], ends: Sequence[int]) -> list[GatherMessages]:
    """Return the rounds of the process in this place of `ranks`, of which each has one block.

    Args:
        place: The place of this process.
        ranks: The processes.
        ends: Where the block of each process begins; then where the last one ends.
    """

    def slices(blocks: Blocks) -> list[slice]:
        return [slice(ends[numbers[0]], ends[numbers[-1] + 1]) for numbers in blocks.ranges()]

    return [
        GatherMessages(ranks[now.to], slices(now.sent), ranks[now.source], slices(now.received))
        for now in gather_rounds(place, len(ranks))
    ]


def _part_of(place: int, order: Order, length: int, unit: int) -> slice:
    """Return the elements that one of the hosts of a node keeps."""
    number, count, units = order.index(place), len(order), length // unit
    return slice(units * number // count * unit, units * (number + 1) // count * unit)


def merge_orders(left: Order, right: Order) -> Order:
    """Return the hosts of two nodes, sorted by the middle of the parts that they keep; equal ones by their place."""
    middles: dict[int, float] = {}
    for order in (left, right):
        for number, place in enumerate(order):
            middle = (number + 0.5) / len(order)
            middles[place] = (middles[place] + middle) / 2 if place in middles else middle
    return sorted(middles, key=lambda place: (middles[place], place))


def find_halving(routes: HostRoutes) -> Halving | None:
    """Return the rounds of halving under a plan; None if hosts are few, or their links unlike.

    All processes get the same answer.
    """
    every = dict.fromkeys(routes.hosts)
    if len(every) < FEWEST_HOSTS or are_unlike(routes.links):
        return None
    holders = {node: host for host in every for node in routes.on_host(host)[2]}
    return Halving(routes, holders) if len(set(holders.values())) > 1 else None
