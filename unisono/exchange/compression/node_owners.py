"""Find which sums are compressed, and which process computes, compresses and sends each of them. Numbers only.

Gradients are compressed at fixed nodes of the tree. With 8 virtual ranks and `compress.groups=4`, on three processes:

    virtual rank    0   1   2   3   4   5   6   7
    node           (  0,2  )(  2,4  )(  4,6  )(  6,8  )      each is compressed as one sum
    process          0   0   0   1   1   1   2   2
    owner             (0,2)   (2,4)   (4,6)   (6,8)          the process that holds the node's first leaf
                        0       0       1       2
    uncompressed               3: 1 -> 0                     partial sums of other processes go to the owner

So bytes are saved when every process holds whole nodes: with as many nodes as virtual ranks (the default), or as many
as processes, or a multiple of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from unisono.plan.reduction_tree import Node, Plan, subtrees


def tree_nodes(leaves: int, count: int | None) -> tuple[Node, ...]:
    """Return the `count` nodes (a power of two) of one level of the tree; None: its leaves."""
    if count is None or count == leaves:
        return tuple(Node(v, v + 1) for v in range(leaves))
    level = [Node(0, leaves)]
    while len(level) < count:
        level = [child for node in level for child in node.children]
    return tuple(level)


@dataclass(frozen=True)
class NodeOwners:
    """The owners of compressed nodes under one assignment of leaves.

    Attributes:
        leaves: The number of leaves of the tree.
        nodes: The nodes that are compressed.
        spans: The span of leaves that each process computes.
    """

    leaves: int
    nodes: tuple[Node, ...]
    spans: tuple[tuple[int, int], ...]

    def owner(self, node: Node) -> int:
        """Return the process that compresses a node and keeps its residual."""
        return next(rank for rank, (lo, hi) in enumerate(self.spans) if lo <= node.lo < hi)

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """The owner of each node."""
        return tuple(map(self.owner, self.nodes))

    def owned(self, rank: int) -> list[int]:
        """Return the numbers of the nodes that a process owns."""
        return [number for number, owner in enumerate(self.owners) if owner == rank]

    def parts(self, rank: int, node: Node) -> tuple[Node, ...]:
        """Return the sums within a node that a process computes by itself."""
        lo, hi = self.spans[rank]
        return subtrees(self.leaves, max(lo, node.lo), min(hi, node.hi))

    @cached_property
    def plan(self) -> Plan:
        """The plan in which each process has computed exactly the nodes that it owns."""
        spans, end = [], 0
        for rank in range(len(self.spans)):
            owned = self.owned(rank)
            begin, end = end, self.nodes[owned[-1]].hi if owned else end
            spans.append((begin, end))
        return Plan(self.leaves, tuple(spans))


def moves(before: Sequence[int], after: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (node, from, to) for each node whose owner has changed."""
    return [(n, a, b) for n, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
