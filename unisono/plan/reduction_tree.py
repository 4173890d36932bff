"""The tree: one fixed association of the sum over V leaves, whoever holds which leaf.

Floating-point addition is commutative but not associative, so the brackets must not depend on placement. A node is the
span (lo, hi) of the leaves under it; it splits in the middle; the root is (0, V). With V = 6:

                 (0,6)
            /              \\
         (0,3)            (3,6)             a process that holds the leaves 0 .. 3 can form (0,3) and (3,4) by itself,
         /   \\            /   \\             and these two partial sums are all that anybody else needs from it
       0   (1,3)        3   (4,6)
            / \\              / \\
           1   2            4   5

Halving aligns with what people have: cut V leaves evenly for any power of two of processes, and every process holds
exactly one subtree, whatever V is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Node(NamedTuple):
    """A node of the tree: the sum of the leaves lo .. hi-1."""

    lo: int
    hi: int

    @property
    def children(self) -> tuple[Node, Node]:
        middle = (self.lo + self.hi) // 2
        return Node(self.lo, middle), Node(middle, self.hi)


@lru_cache(maxsize=65536)
def subtrees(leaves: int, lo: int, hi: int) -> tuple[Node, ...]:
    """The largest complete subtrees inside the span [lo, hi) of a tree over `leaves` leaves, from left to right."""
    found: list[Node] = []

    def visit(node: Node) -> None:
        if lo <= node.lo and node.hi <= hi:
            found.append(node)
        elif node.lo < hi and lo < node.hi:
            for child in node.children:
                visit(child)

    if lo < hi:
        visit(Node(0, leaves))
    return tuple(found)


@lru_cache(maxsize=65536)
def copies(leaves: int, lo: int, hi: int) -> int:
    """Gradient copies alive, at most, while the leaves of a span are computed one after the other and folded.

    A subtree of m leaves needs ceil(log2 m) + 1 of them: no order of visiting a balanced tree needs fewer (Sethi and
    Ullman, 1970). Subtrees that are finished wait beside it. So r + 2 holds up to subtrees of four leaves, and each
    doubling of a subtree costs one more.
    """
    return max((i + (n.hi - n.lo - 1).bit_length() + 1 for i, n in enumerate(subtrees(leaves, lo, hi))), default=0)


def fold(node: Node, have: dict[Node, T], add: Callable[[T, T], T]) -> T:
    """The sum at `node`, in tree order, from the sums of disjoint nodes that cover it."""
    if node in have:
        return have[node]
    left, right = node.children
    return add(fold(left, have, add), fold(right, have, add))


@lru_cache(maxsize=65536)
def parent(leaves: int, left: Node, right: Node) -> Node | None:
    """The node whose two children are `left` and `right`, or None when they are not siblings."""
    both = Node(left.lo, right.hi)
    return both if both.children == (left, right) and subtrees(leaves, *both) == (both,) else None


@lru_cache(maxsize=65536)
def sibling(leaves: int, node: Node) -> Node | None:
    """The other child of the node's parent; None for the root."""
    at = Node(0, leaves)
    while at.hi - at.lo > 1:
        left, right = at.children
        if node in (left, right):
            return right if node == left else left
        at = left if node.hi <= left.hi else right
    return None


class NodeHeap(Generic[T]):
    """Folds leaves that come in any order, each once: siblings are merged as soon as both are there. `add` is as for
    `Fold`; `held` is what waits, the largest complete subtrees of all that came."""

    def __init__(self, leaves: int, add: Callable[[T, T], T]) -> None:
        self.leaves, self.add = leaves, add
        self.held: dict[Node, T] = {}

    def push(self, node: Node, value: T) -> None:
        while (other := sibling(self.leaves, node)) in self.held:
            assert other is not None
            pair = (value, self.held.pop(other)) if node < other else (self.held.pop(other), value)
            node, value = Node(min(node.lo, other.lo), max(node.hi, other.hi)), self.add(*pair)
        self.held[node] = value


class Fold(Generic[T]):
    """Folds nodes (mostly leaves) as they come, from left to right, merging siblings as soon as both are there.

    `add(a, b)` returns a + b and may reuse a. `held` is what waits: at the end, the largest complete subtrees of the
    span that was pushed, in order. It is never longer than `copies` says. `first` is the leaf where this span begins.
    """

    def __init__(self, leaves: int, add: Callable[[T, T], T], first: int = 0) -> None:
        self.leaves, self.add, self.first = leaves, add, first
        self.held: list[tuple[Node, T]] = []

    def push(self, node: Node, value: T) -> None:
        self.held.append((node, value))
        while len(self.held) > 1 and (both := parent(self.leaves, self.held[-2][0], self.held[-1][0])):
            (_, left), (_, right) = self.held[-2:]
            self.held[-2:] = [(both, self.add(left, right))]

    def skip_to(self, leaf: int, nothing: T) -> None:
        """The leaves from the last one that was pushed up to this one have nothing."""
        for empty in range(self.held[-1][0].hi if self.held else self.first, leaf):
            self.push(Node(empty, empty + 1), nothing)


@dataclass(frozen=True)
class Plan:
    """Who sends what, for one placement: spans[r] is the span [lo, hi) of virtual ranks that process r holds.

    The gradient is cut into one chunk a process. Every process sends chunk c of each of its partial sums to process c,
    which folds what it receives in tree order and hands the result to everybody:

        process 0 holds (0,3) (3,4)      all-to-all          fold in place             all-gather
        process 1 holds (4,6)            of partial sums     [0] [1] [2]: 1 += 2       of finished
                                         0: (0,3) (3,4) (4,6)             0 += 1       chunks
                                         1: (0,3) (3,4) (4,6)
    """

    leaves: int
    spans: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """How many processes take part."""
        return len(self.spans)

    def sends(self, rank: int) -> tuple[Node, ...]:
        """The partial sums that process `rank` forms by itself and sends, a chunk of each to every process."""
        return subtrees(self.leaves, *self.spans[rank])

    def arrivals(self) -> tuple[Node, ...]:
        """What every process receives, in this order: the partial sums of process 0, then of process 1, and so on."""
        return tuple(node for rank in range(self.size) for node in self.sends(rank))

    def additions(self) -> tuple[tuple[int, int], ...]:
        """Pairs (i, j) to be carried out in order on the arrivals: number i += number j. The last makes the total."""
        steps: list[tuple[int, int]] = []

        def add(i: int, j: int) -> int:
            steps.append((i, j))
            return i

        fold(Node(0, self.leaves), {node: i for i, node in enumerate(self.arrivals())}, add)
        return tuple(steps)

    def traffic(self, rank: int) -> float:
        """What `rank` sends in one exchange, in gradients: its partial sums to the others, then its chunk to each.

        An ordinary ring all-reduce sends 2 (W - 1) / W; an aligned plan sends exactly that.
        """
        others = (self.size - 1) / self.size
        return len(self.sends(rank)) * others + others


@dataclass(frozen=True)
class ScatteredPlan(Plan):
    """Who sends what, if leaves went to whoever was free: owners[leaf] is the process that computed it, and `spans` say
    nothing any more."""

    owners: tuple[int, ...] = ()

    def sends(self, rank: int) -> tuple[Node, ...]:
        found: list[Node] = []
        first = 0
        for owner, run in groupby(self.owners):
            end = first + len(list(run))
            if owner == rank:
                found += subtrees(self.leaves, first, end)
            first = end
        return tuple(found)


def chain(values: Sequence[float]) -> float:
    """The sum of numbers from left to right: how rows of a small table are folded, by everybody alike."""
    total = 0.0
    for value in values:
        total += value
    return total
