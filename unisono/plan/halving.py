"""Recursive halving and doubling along the tree: 2 log2(H) messages between H hosts in place of 2 (H - 1).

If each host holds exactly one subtree, and all these subtrees are on one level of the tree, the tree pairs the hosts:
those whose subtrees are siblings add up first, then those of the next level, and so on. In each round a host keeps one
half of what it holds, and sends the other half to its partner. Doubling then returns the totals the same way:

    host    holds     round 0, with host ^ 1        round 1, with host ^ 2        doubling
    0       (0,2)     (0,4), elements 0 to 1/2      total, elements 0 to 1/4      with host ^ 2, then with host ^ 1
    1       (2,4)     (0,4), elements 1/2 to 1      total, elements 1/2 to 3/4
    2       (4,6)     (4,8), elements 0 to 1/2      total, elements 1/4 to 1/2
    3       (6,8)     (4,8), elements 1/2 to 1      total, elements 3/4 to 1

Every element is added up in the order of the tree. A host sends (H - 1) / H gradients of partial sums and as much of
totals, as with direct messages (Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in
MPICH, 2005).

With P processes on each host, the process in place p does this for region p of P equal regions of the gradient, with
the processes in the same place on other hosts. Within a host processes read each other's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from unisono.plan.host_routes import HostRoutes
from unisono.plan.link_shares import are_unlike
from unisono.plan.reduction_tree import Node, parent

FEWEST_HOSTS = 32
"""With fewer hosts direct messages, which have two rounds, are as quick (docs/design/growth.md). At least 2."""


class Round(NamedTuple):
    """One round of halving. Doubling has the same rounds in reverse.

    Attributes:
        partner: The rank with which this process exchanges halves.
        is_left: Whether the sum of this process is the left operand of the addition.
        kept: The elements that this process keeps, as a slice of the region.
        sent: The elements that the partner keeps.
        known: The virtual ranks whose weights this process knows before the round.
        learned: The virtual ranks whose weights the partner knows.
    """

    partner: int
    is_left: bool
    kept: slice
    sent: slice
    known: Node
    learned: Node


class Halving:
    """The rounds of one process under one plan.

    Args:
        routes: The plan and the hosts, as seen from this process.
        hosts: The hosts, in the order of their subtrees.
    """

    def __init__(self, routes: HostRoutes, hosts: Sequence[int]) -> None:
        self.routes, self.rank = routes, routes.rank
        self.count = len(hosts).bit_length() - 1
        """The number of rounds."""
        place = routes.local.index(routes.rank)
        self.column = [routes.ranks_on(host)[place] for host in hosts]
        """The ranks in the same place as this one on each host."""
        self._nodes = [routes.on_host(host)[2][0] for host in hosts]

    def regions(self, length: int, unit: int) -> list[slice]:
        """Return the region of each rank among `length` elements, a multiple of `unit` for each rank."""
        size = length // len(self.routes.local)
        assert size % (unit * len(self.column)) == 0
        places = [self.routes.ranks_on(host).index(rank) for rank, host in enumerate(self.routes.hosts)]
        return [slice(place * size, (place + 1) * size) for place in places]

    def rounds(self, length: int) -> list[Round]:
        """Return the rounds for a region of `length` elements."""
        mine = self.column.index(self.rank)
        start, stop, found = 0, length, []
        for k in range(self.count):
            middle, partner, is_left = (start + stop) // 2, mine ^ 1 << k, not mine >> k & 1
            halves = slice(start, middle), slice(middle, stop)
            kept, sent = halves if is_left else halves[::-1]
            blocks = self._block(mine, k), self._block(partner, k)
            found.append(Round(self.column[partner], is_left, kept, sent, *blocks))
            start, stop = kept.start, kept.stop
        return found

    def _block(self, position: int, bits: int) -> Node:
        """Return the node of the 2^bits hosts that have added up with the host at a position."""
        first = position >> bits << bits
        return Node(self._nodes[first].lo, self._nodes[first + (1 << bits) - 1].hi)


def find_halving(routes: HostRoutes) -> Halving | None:
    """Return the rounds of halving under a plan; None if hosts do not hold equal parts of the tree, or are few.

    All processes get the same answer.
    """
    every = sorted(set(routes.hosts))
    count, processes = len(every), len(routes.local)
    if count < FEWEST_HOSTS or count & (count - 1) or are_unlike(routes.links):
        return None
    if any(len(routes.ranks_on(host)) != processes for host in every):
        return None
    held = [(nodes, host) for host in every if len(nodes := routes.on_host(host)[2]) == 1]
    if len(held) < count:
        return None
    held.sort()
    level = [nodes[0] for nodes, _ in held]
    while len(level) > 1:
        above = [parent(routes.plan.leaves, *pair) for pair in zip(level[::2], level[1::2], strict=True)]
        if None in above:
            return None
        level = [node for node in above if node is not None]
    return Halving(routes, [host for _, host in held])
