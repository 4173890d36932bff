"""Which sums are compressed: fixed nodes of the tree, and who makes, keeps and sends what of them. Numbers only.

With 8 virtual ranks and `compress.groups=4`, on three processes:

    virtual rank    0   1   2   3   4   5   6   7
    node           (  0,2  )(  2,4  )(  4,6  )(  6,8  )      each is compressed as one, whoever holds it
    process          0   0   0   1   1   1   2   2
    it owns          (0,2)   (2,4)    (4,6)   (6,8)          the process that holds its first leaf
                       0       0        1       2
    it hands on                3 -> 0  -                     what others made of it comes to its owner uncompressed

So bytes are saved when every process holds whole nodes: as many nodes as virtual ranks (the default), or as many as
there are processes, or a multiple.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from unisono.plan.reduction_tree import Node, Plan, subtrees


def tree_nodes(leaves: int, count: int | None) -> tuple[Node, ...]:
    """The nodes of one level of the tree, `count` of them (a power of two); None: its leaves."""
    if count is None or count == leaves:
        return tuple(Node(v, v + 1) for v in range(leaves))
    level = [Node(0, leaves)]
    while len(level) < count:
        level = [child for node in level for child in node.children]
    return tuple(level)


@dataclass(frozen=True)
class NodeOwners:
    """For one placement: spans[r] is the span of leaves that process r computes."""

    leaves: int
    nodes: tuple[Node, ...]
    spans: tuple[tuple[int, int], ...]

    def owner(self, node: Node) -> int:
        """The process that compresses the node, and keeps what compressing it has left over."""
        return next(rank for rank, (lo, hi) in enumerate(self.spans) if lo <= node.lo < hi)

    @cached_property
    def owners(self) -> tuple[int, ...]:
        return tuple(map(self.owner, self.nodes))

    def owned(self, rank: int) -> list[int]:
        """The numbers of a process's nodes."""
        return [number for number, owner in enumerate(self.owners) if owner == rank]

    def parts(self, rank: int, node: Node) -> tuple[Node, ...]:
        """The sums within a node that a process makes by itself."""
        lo, hi = self.spans[rank]
        return subtrees(self.leaves, max(lo, node.lo), min(hi, node.hi))

    @cached_property
    def plan(self) -> Plan:
        """As if every process had computed the nodes that it owns, and nothing else."""
        spans, end = [], 0
        for rank in range(len(self.spans)):
            owned = self.owned(rank)
            begin, end = end, self.nodes[owned[-1]].hi if owned else end
            spans.append((begin, end))
        return Plan(self.leaves, tuple(spans))


def moves(before: Sequence[int], after: Sequence[int]) -> list[tuple[int, int, int]]:
    """(node, from, to) of every node whose owner is another one now."""
    return [(n, a, b) for n, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
