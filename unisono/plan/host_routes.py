"""The ways of chunks between hosts: one process of each host adds up what its host holds of a chunk, and sends that.

The gradient is divided into one chunk for each process (plan/reduction_tree.py), and the owner of a chunk adds it up.
On each other host one process, the forwarder of the chunk there, reads the partial sums of all processes of its host in
shared memory. It makes the additions of the tree that need no other host, and sends the sums to the owner. The owner
returns the total to it. So a chunk crosses the link of a host once in each direction, for any number of processes:

    host a   rank 0 owns chunk 0    rank 1 owns chunk 1          rank 0 receives chunk 0 of (2,4) from rank 2
             holds (0,1)            holds (1,2)                  rank 1 receives chunk 1 of (2,4) from rank 3
    host b   rank 2 owns chunk 2    rank 3 owns chunk 3          rank 2 receives chunk 2 of (0,2) from rank 0
             holds (2,3)            holds (3,4)                  rank 3 receives chunk 3 of (0,2) from rank 1

With H hosts whose leaves form one subtree each, a host sends (H - 1) / H gradients of partial sums and as much of
totals. A ring all-reduce over H processes sends the same. Where each process is a host of its own, it sends its own
partial sums. On a single host nothing is forwarded.

Chunks have equal lengths, unless links have unlike rates (plan/link_shares.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from unisono.plan.link_shares import are_unlike, chunk_ends, host_shares
from unisono.plan.reduction_tree import Node, Plan, fold, parent

Pairs = Sequence[tuple[int, int]]
"""Additions (i, j): add term j to term i, in this order."""


class HostRoutes:
    """The ways of chunks under one plan, as seen from one process.

    Args:
        plan: Which process holds which partial sums.
        hosts: The host of each rank: equal numbers share memory.
        rank: This process.
        links: The rate of the link of each rank's host, equal on all processes; empty: all are alike.
    """

    def __init__(self, plan: Plan, hosts: Sequence[int], rank: int, links: Sequence[float] = ()) -> None:
        self.plan, self.hosts, self.rank, self.host = plan, tuple(hosts), rank, hosts[rank]
        self.links = tuple(links)
        self._on: dict[int, list[int]] = {}
        for other, host in enumerate(hosts):
            self._on.setdefault(host, []).append(other)
        self.local = self._on[self.host]
        """The ranks on this host, in order."""
        self.remote_hosts = [host for host in self._on if host != self.host]
        self.forwarded = [chunk for chunk in range(plan.size) if self._is_forwarded(chunk)]
        """The chunks of other hosts that this process forwards."""

    def _is_forwarded(self, chunk: int) -> bool:
        return self.hosts[chunk] != self.host and self.forwarder(self.host, chunk) == self.rank

    def ranks_on(self, host: int) -> Sequence[int]:
        """Return the ranks on a host, in order."""
        return self._on[host]

    def forwarder(self, host: int, chunk: int) -> int:
        """Return the rank on another host that forwards a chunk: the one in the owner's place there."""
        place, ranks = self._on[self.hosts[chunk]].index(chunk), self._on[host]
        return ranks[place % len(ranks)]

    @cached_property
    def shares(self) -> list[float]:
        """The share of the gradient that each rank owns."""
        if len(self._on) < 3 or not are_unlike(self.links):
            return [1 / self.plan.size] * self.plan.size
        sums = [len(self.on_host(host)[1]) for host in self._on]
        of_hosts = dict(zip(self._on, host_shares(sums, [self.links[host] for host in self._on]), strict=True))
        return [of_hosts[host] / len(self._on[host]) for host in self.hosts]

    def chunks(self, length: int, unit: int) -> list[slice]:
        """Return the chunk of each rank among `length` elements, a multiple of `unit` for each rank."""
        ends = chunk_ends(length, self.shares, unit)
        return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    def holders(self, host: int) -> list[tuple[int, int]]:
        """Return (rank, index) of each partial sum on a host, in the order of ranks. Index: among those of its rank."""
        return [(rank, index) for rank in self._on[host] for index in range(len(self.plan.sends(rank)))]

    def on_host(self, host: int) -> tuple[Pairs, list[int], list[Node]]:
        """Return what a forwarder computes: the additions among the `holders` of its host, and what remains.

        Returns:
            The additions; the terms that remain afterward; the nodes of the tree that these are.
        """
        nodes = [node for rank in self._on[host] for node in self.plan.sends(rank)]
        left = sorted(range(len(nodes)), key=lambda term: nodes[term])
        pairs: list[tuple[int, int]] = []
        held: list[int] = []
        for term in left:  # as plan.reduction_tree.Fold, but gaps between spans may remain
            held.append(term)
            while len(held) > 1 and (both := self._parent(nodes[held[-2]], nodes[held[-1]])):
                i, j = held[-2:]
                pairs.append((i, j))
                nodes[i] = both
                held.pop()
        return pairs, held, [nodes[term] for term in held]

    def _parent(self, left: Node, right: Node) -> Node | None:
        return parent(self.plan.leaves, left, right) if left.hi == right.lo else None

    @cached_property
    def received(self) -> dict[int, list[Node]]:
        """The nodes that the owner of a chunk receives from each other host."""
        return {host: self.on_host(host)[2] for host in self.remote_hosts}

    @cached_property
    def additions(self) -> Pairs:
        """The additions that make the total of an owned chunk. The last one makes the total.

        The terms are the `holders` of this host, and then what is `received` from each other host.
        """
        steps: list[tuple[int, int]] = []
        nodes = [node for rank in self.local for node in self.plan.sends(rank)]
        for host in self.remote_hosts:
            nodes += self.received[host]

        def add(i: int, j: int) -> int:
            steps.append((i, j))
            return i

        fold(Node(0, self.plan.leaves), {node: i for i, node in enumerate(nodes)}, add)
        return tuple(steps)

    def crossing(self) -> float:
        """Return how many gradients this process sends to other hosts."""
        forwarded = sum(self.shares[chunk] for chunk in self.forwarded)
        return len(self.on_host(self.host)[1]) * forwarded + len(self.remote_hosts) * self.shares[self.rank]
