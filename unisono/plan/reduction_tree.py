"""The reduction tree: one fixed order of adding up V leaves, whichever processes hold them.

Floating-point addition is commutative but not associative, so the order of additions must not depend on the assignment
of leaves to processes. A node is the span (lo, hi) of the leaves under it; it splits in the middle; the root is (0, V).
With V = 6:

                 (0,6)
            /              \\
         (0,3)            (3,6)             a process that holds the leaves 0 .. 3 can form (0,3) and (3,4) by itself,
         /   \\            /   \\             and the other processes need only these two partial sums from it
       0   (1,3)        3   (4,6)
            / \\              / \\
           1   2            4   5

Halving suits common numbers of processes: if V leaves are divided evenly among a power of two of processes, every
process holds exactly one subtree, whatever V is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Node(NamedTuple):
    """A node of the tree: the sum of the leaves lo to hi - 1."""

    lo: int
    hi: int

    @property
    def children(self) -> tuple[Node, Node]:
        middle = (self.lo + self.hi) // 2
        return Node(self.lo, middle), Node(middle, self.hi)


@lru_cache(maxsize=65536)
def subtrees(leaves: int, lo: int, hi: int) -> tuple[Node, ...]:
    """Return the largest complete subtrees inside the span [lo, hi) of a tree over `leaves` leaves, left to right."""
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


@lru_cache(maxsize=1 << 18)
def count_subtrees(leaves: int, lo: int, hi: int) -> int:
    """Return the length of `subtrees(leaves, lo, hi)`, in 2 log2(leaves) steps."""
    if lo >= hi:
        return 0
    first, end = 0, leaves
    while (first, end) != (lo, hi):
        middle = (first + end) // 2
        if hi <= middle:
            end = middle
        elif lo >= middle:
            first = middle
        else:
            return _count_from(lo, first, middle) + _count_to(hi, middle, end)
    return 1


def _count_from(at: int, first: int, end: int) -> int:
    """Return the number of subtrees of the leaves [at, end) of the node (first, end)."""
    count = 1
    while at != first:
        middle = (first + end) // 2
        if at >= middle:
            first = middle
        else:
            count, end = count + 1, middle
    return count


def _count_to(at: int, first: int, end: int) -> int:
    """Return the number of subtrees of the leaves [first, at) of the node (first, end)."""
    count = 1
    while at != end:
        middle = (first + end) // 2
        if at <= middle:
            end = middle
        else:
            count, first = count + 1, middle
    return count


@lru_cache(maxsize=65536)
def copies(leaves: int, lo: int, hi: int) -> int:
    """Return the most gradient copies alive while the leaves of a span are computed in order and added up.

    A subtree of m leaves needs ceil(log2 m) + 1 of them; no order of visiting a balanced tree needs fewer (Sethi and
    Ullman, 1970). Finished subtrees are kept meanwhile. So r subtrees of up to four leaves need r + 2 copies, and each
    doubling of a subtree costs one more.
    """
    return max((i + (n.hi - n.lo - 1).bit_length() + 1 for i, n in enumerate(subtrees(leaves, lo, hi))), default=0)


def fold(node: Node, have: dict[Node, T], add: Callable[[T, T], T]) -> T:
    """Return the sum at `node`, in tree order, from the sums of disjoint nodes that cover it."""
    if node in have:
        return have[node]
    left, right = node.children
    return add(fold(left, have, add), fold(right, have, add))


@lru_cache(maxsize=65536)
def parent(leaves: int, left: Node, right: Node) -> Node | None:
    """Return the node whose children are `left` and `right`; None if they are not siblings."""
    both = Node(left.lo, right.hi)
    return both if both.children == (left, right) and subtrees(leaves, *both) == (both,) else None


@lru_cache(maxsize=65536)
def sibling(leaves: int, node: Node) -> Node | None:
    """Return the other child of the node's parent; None for the root."""
    at = Node(0, leaves)
    while at.hi - at.lo > 1:
        left, right = at.children
        if node in (left, right):
            return right if node == left else left
        at = left if node.hi <= left.hi else right
    return None


class NodeHeap(Generic[T]):
    """Fold leaves in any order, each once: siblings are added as soon as both are known.

    Attributes:
        leaves: of the tree.
        add: as for Fold.
        held: the sums that wait for a sibling: the largest complete subtrees of the leaves so far.
    """

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
    """Fold nodes (mostly leaves) from left to right: siblings are added as soon as both are known.

    Attributes:
        leaves: of the tree.
        add: add(a, b) returns a + b and may reuse the memory of a.
        first: the leaf at which the span begins.
        held: the sums that wait for a sibling; at the end the largest complete subtrees of the span, in order. It is
            never longer than `copies` returns.
    """

    def __init__(self, leaves: int, add: Callable[[T, T], T], first: int = 0) -> None:
        self.leaves, self.add, self.first = leaves, add, first
        self.held: list[tuple[Node, T]] = []

    def push(self, node: Node, value: T) -> None:
        self.held.append((node, value))
        while len(self.held) > 1 and (both := parent(self.leaves, self.held[-2][0], self.held[-1][0])):
            (_, left), (_, right) = self.held[-2:]
            self.held[-2:] = [(both, self.add(left, right))]

    def skip_to(self, leaf: int, zero: T) -> None:
        """Push `zero` for the leaves up to, not including, `leaf`."""
        for empty in range(self.held[-1][0].hi if self.held else self.first, leaf):
            self.push(Node(empty, empty + 1), zero)


@dataclass(frozen=True)
class Plan:
    """The messages for one assignment of virtual ranks to processes.

    The gradient is divided into one chunk for each process. Every process sends chunk c of each of its partial sums to
    process c, which adds the received chunks in tree order and sends the result to all processes:

        process 0 holds (0,3) (3,4)      all-to-all          fold in place             all-gather
        process 1 holds (4,6)            of partial sums     [0] [1] [2]: 1 += 2       of finished
                                         0: (0,3) (3,4) (4,6)             0 += 1       chunks
                                         1: (0,3) (3,4) (4,6)

    Attributes:
        leaves: V, the number of virtual ranks.
        spans: the span [lo, hi) of virtual ranks of each process.
    """

    leaves: int
    spans: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """The number of processes."""
        return len(self.spans)

    def sends(self, rank: int) -> tuple[Node, ...]:
        """Return the partial sums that process `rank` forms by itself and sends, a chunk of each to every process."""
        return subtrees(self.leaves, *self.spans[rank])

    def arrivals(self) -> tuple[Node, ...]:
        """Return the partial sums that every process receives: those of process 0, then of process 1, and so on."""
        return tuple(node for rank in range(self.size) for node in self.sends(rank))

    def additions(self) -> tuple[tuple[int, int], ...]:
        """Return pairs (i, j): add arrival j to arrival i, in this order. The last addition makes the total."""
        steps: list[tuple[int, int]] = []

        def add(i: int, j: int) -> int:
            steps.append((i, j))
            return i

        fold(Node(0, self.leaves), {node: i for i, node in enumerate(self.arrivals())}, add)
        return tuple(steps)

    def traffic(self, rank: int) -> float:
        """Return how many gradients `rank` sends in one exchange: its partial sums, then its chunk to each process.

        A ring all-reduce over W processes sends 2 (W - 1) / W; a plan of aligned spans sends exactly that.
        """
        others = (self.size - 1) / self.size
        return len(self.sends(rank)) * others + others


@dataclass(frozen=True)
class ScatteredPlan(Plan):
    """The messages where any process may have computed any leaf, as with work stealing. `spans` is not used then.

    Attributes:
        owners: the process that computed each leaf.
    """

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
    """Return the sum of numbers from left to right, the order in which every process adds the rows of small tables."""
    total = 0.0
    for value in values:
        total += value
    return total
