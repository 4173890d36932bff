"""The reduction tree and the assignment: one sum, however the leaves are divided."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from math import ceil, log2
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.scores import quick, sizes, virtual_ranks
from unisono.plan import assignment, reduction_tree, rng_keys
from unisono.plan.assignment import assign, assign_evenly
from unisono.plan.reduction_tree import (
    Fold,
    Node,
    NodeHeap,
    Plan,
    ScatteredPlan,
    chain,
    copies,
    fold,
    sibling,
    subtrees,
)


def even(parts: list[int]) -> bool:
    return max(parts) - min(parts) <= 1


# -- the tree


Expression = Any  # a leaf's number, or a pair of expressions: brackets written down


def brackets(leaves: int) -> Expression:
    """Return the tree over `leaves` by its definition: halves, down to single leaves."""

    def at(lo: int, hi: int) -> Expression:
        return lo if hi - lo == 1 else (at(lo, (lo + hi) // 2), at((lo + hi) // 2, hi))

    return at(0, leaves)


def pair(a: Expression, b: Expression) -> Expression:
    return (a, b)


@quick
@given(virtual_ranks, st.data())
def test_subtrees_are_the_largest_and_cover_the_span(leaves: int, data: st.DataObject) -> None:
    lo = data.draw(st.integers(0, leaves))
    hi = data.draw(st.integers(lo, leaves))
    found = subtrees(leaves, lo, hi)
    assert [leaf for node in found for leaf in range(*node)] == list(range(lo, hi))
    every_node = nodes(leaves)
    assert all(node in every_node for node in found)
    for node in found:  # its parent is not inside the span
        assert not any(lo <= p.lo and p.hi <= hi and node in p.children for p in every_node if p.hi - p.lo > 1)
    assert len(found) <= max(1, 2 * ceil(log2(leaves + 1)))


def nodes(leaves: int) -> set[Node]:
    found = {Node(0, leaves)}
    waiting = [Node(0, leaves)]
    while waiting:
        node = waiting.pop()
        if node.hi - node.lo > 1:
            found.update(node.children)
            waiting.extend(node.children)
    return found


@quick
@given(virtual_ranks, sizes, st.data())
def test_leaves_in_any_order_are_added_in_tree_order(leaves: int, size: int, data: st.DataObject) -> None:
    """Each process folds its leaves in any order; the plan folds their partial sums."""
    owners = data.draw(st.lists(st.integers(0, size - 1), min_size=leaves, max_size=leaves))
    order = data.draw(st.permutations(range(leaves)))
    plan = ScatteredPlan(leaves, ((0, 0),) * size, tuple(owners))
    heaps: list[NodeHeap[Expression]] = [NodeHeap(leaves, pair) for _ in range(size)]
    for leaf in order:
        heaps[owners[leaf]].push(Node(leaf, leaf + 1), leaf)
    assert [list(plan.sends(rank)) for rank in range(size)] == [sorted(heap.held) for heap in heaps]
    sums = [heaps[rank].held[node] for rank in range(size) for node in plan.sends(rank)]
    for i, j in plan.additions():
        sums[i] = (sums[i], sums[j])
    total = sums[plan.additions()[-1][0]] if plan.additions() else sums[0]
    assert total == brackets(leaves)


@quick
@given(virtual_ranks)
def test_siblings_share_a_parent(leaves: int) -> None:
    for node in nodes(leaves):
        other = sibling(leaves, node)
        assert (other is None) == (node == Node(0, leaves))
        if other is not None:
            assert reduction_tree.parent(leaves, min(node, other), max(node, other)) is not None


@quick
@given(virtual_ranks, st.data())
def test_parents_are_those_of_the_tree(leaves: int, data: st.DataObject) -> None:
    every_node = sorted(nodes(leaves))
    left = data.draw(st.sampled_from(every_node))
    right = data.draw(st.sampled_from(every_node))
    expected = next((p for p in every_node if p.hi - p.lo > 1 and p.children == (left, right)), None)
    assert reduction_tree.parent(leaves, left, right) == expected
    for node in every_node:
        if node.hi - node.lo > 1:
            assert reduction_tree.parent(leaves, *node.children) == node


@pytest.mark.parametrize("leaves", [*range(1, 20), 31, 32, 33, 61, 64, 97, 127, 128])
def test_folding_a_span_holds_as_many_copies_as_promised(leaves: int) -> None:
    """`copies` is not only a bound: it is reached, for every span."""
    spans = [(lo, hi) for lo in range(leaves) for hi in range(lo + 1, leaves + 1)]
    for lo, hi in spans if leaves <= 20 else random.Random(leaves).sample(spans, 60):
        most = 0
        folding: Fold[Expression] = Fold(leaves, pair)
        alive: set[int] = set()
        for leaf in range(lo, hi):
            alive.add(leaf)
            most = max(most, len(folding.held) + 1)  # those that wait, and the leaf that is computed
            folding.push(Node(leaf, leaf + 1), leaf)
            assert len(folding.held) <= copies(leaves, lo, hi)
        assert most == copies(leaves, lo, hi)
        assert tuple(node for node, _ in folding.held) == subtrees(leaves, lo, hi)
        # the stated law: a span of r subtrees of at most four leaves needs no more than r + 2
        largest = max(node.hi - node.lo for node in subtrees(leaves, lo, hi))
        assert most <= len(subtrees(leaves, lo, hi)) + max(2, ceil(log2(largest)))
    assert copies(leaves, 0, 0) == 0
    assert copies(leaves, 0, leaves) == ceil(log2(leaves)) + 1


@quick
@given(virtual_ranks, st.data())
def test_a_folded_span_is_added_in_tree_order(leaves: int, data: st.DataObject) -> None:
    lo = data.draw(st.integers(0, leaves - 1))
    hi = data.draw(st.integers(lo + 1, leaves))
    folding: Fold[Expression] = Fold(leaves, pair)
    for leaf in range(lo, hi):
        folding.push(Node(leaf, leaf + 1), leaf)
    for node, value in folding.held:
        assert value == fold(node, {Node(i, i + 1): i for i in range(leaves)}, pair)
    if (lo, hi) == (0, leaves):
        assert folding.held[0][1] == brackets(leaves)


@quick
@given(virtual_ranks, st.randoms(use_true_random=False))
def test_partial_sums_fold_like_their_leaves(leaves: int, chance: random.Random) -> None:
    def ready(node: Node) -> list[Node]:
        """Return a random cut through the tree below `node`."""
        if node.hi - node.lo == 1 or chance.random() < 0.3:
            return [node]
        left, right = node.children
        return ready(left) + ready(right)

    single = {Node(i, i + 1): i for i in range(leaves)}
    folding: Fold[Expression] = Fold(leaves, pair)
    for node in ready(Node(0, leaves)):
        folding.push(node, fold(node, single, pair))
    assert folding.held == [(Node(0, leaves), brackets(leaves))]


# -- placement


def carry_out(plan: Plan, value: Callable[[int], Any], add: Callable[[Any, Any], Any]) -> Any:
    """Return the sum on every process: spans are folded locally, sent, and added by the plan."""
    arrived: list[Any] = []
    for rank in range(plan.size):
        folding: Fold[Any] = Fold(plan.leaves, add)
        for leaf in range(*plan.spans[rank]):
            folding.push(Node(leaf, leaf + 1), value(leaf))
        assert tuple(node for node, _ in folding.held) == plan.sends(rank)
        arrived += [partial for _, partial in folding.held]
    assert len(arrived) == len(plan.arrivals())
    taken: set[int] = set()
    for i, j in plan.additions():
        assert i not in taken
        assert j not in taken
        assert i < j  # in place: the left one is overwritten, the right one is free from now on
        arrived[i] = add(arrived[i], arrived[j])
        taken.add(j)
    assert taken == set(range(1, len(arrived)))
    return arrived[0]


def covers(spans: assignment.Spans, leaves: int, size: int) -> bool:
    at = 0
    for lo, hi in spans:
        if lo != at or hi < lo:
            return False
        at = hi
    return at == leaves and len(spans) == size


@pytest.mark.parametrize(("size", "sites"), [(2, 2), (4, 2), (6, 3), (9, 3), (6, 2)])
def test_every_site_has_its_own_block_of_virtual_ranks(size: int, sites: int) -> None:
    spans, share, each = assign_evenly(18, size, sites), 18 // sites, size // sites
    assert covers(spans, 18, size)
    for site in range(sites):
        alone = [(lo - site * share, hi - site * share) for lo, hi in spans[site * each : (site + 1) * each]]
        assert tuple(alone) == assign_evenly(share, each)


@quick
@given(virtual_ranks, sizes)
@example(1, 1024)
@example(128, 1024)
@example(128, 128)
@example(127, 61)
def test_an_even_assignment_gives_the_sum_of_the_tree(leaves: int, size: int) -> None:
    spans = assign_evenly(leaves, size)
    assert covers(spans, leaves, size)
    widths = [hi - lo for lo, hi in spans]
    assert max(widths) == ceil(leaves / size)  # no process has more leaves than in the most even division
    assert carry_out(Plan(leaves, spans), lambda leaf: leaf, pair) == brackets(leaves)


@quick
@given(virtual_ranks, st.data())
def test_an_uneven_assignment_gives_the_sum_of_the_tree(leaves: int, data: st.DataObject) -> None:
    seconds = data.draw(st.lists(st.floats(0.01, 100) | st.sampled_from([1.0, 2.0, 3.0]), min_size=1, max_size=24))
    spans = assign(leaves, seconds)
    assert covers(spans, leaves, len(seconds))
    assert carry_out(Plan(leaves, spans), lambda leaf: leaf, pair) == brackets(leaves)
    # the step ends as early as it can: an earlier end would leave virtual ranks over
    end = max((hi - lo) * s for (lo, hi), s in zip(spans, seconds, strict=True))
    assert sum(sum(1 for n in range(1, leaves + 1) if n * s < end) for s in seconds) < leaves


@quick
@given(virtual_ranks, st.data())
def test_any_division_gives_the_same_bits(leaves: int, data: st.DataObject) -> None:
    """Unusual divisions, with empty spans; float32 numbers whose sum depends on the order of addition."""
    cuts = sorted(data.draw(st.lists(st.integers(0, leaves), max_size=12)))
    bounds = [0, *cuts, leaves]
    plan = Plan(leaves, tuple(pairwise(bounds)))
    generator = np.random.default_rng(leaves)
    values = (generator.standard_normal(leaves) * 10.0 ** generator.integers(-8, 9, leaves)).astype(np.float32)

    def add(a: np.float32, b: np.float32) -> np.float32:
        return np.float32(a + b)

    expected = fold(Node(0, leaves), {Node(i, i + 1): values[i] for i in range(leaves)}, add)
    assert carry_out(plan, lambda leaf: values[leaf], add).tobytes() == expected.tobytes()


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 8, 16, 61, 127, 128, 129, 512, 1024])
@pytest.mark.parametrize("leaves", [1, 5, 8, 31, 97, 128])
def test_the_whole_range_of_processes(leaves: int, size: int) -> None:
    for seconds in ([1.0] * size, [1.0 + rank % 3 for rank in range(size)]):
        spans = assign(leaves, seconds)
        assert covers(spans, leaves, size)
        plan = Plan(leaves, spans)
        assert carry_out(plan, lambda leaf: leaf, pair) == brackets(leaves)


@quick
@given(virtual_ranks, st.integers(1, 64))
def test_traffic_is_what_the_plan_sends(leaves: int, size: int) -> None:
    """Counted by sending: a gradient of `size` chunks, so that each chunk is 1 / size of it."""
    plan = Plan(leaves, assign_evenly(leaves, size))
    sent = [0] * size
    for rank in range(size):
        for to in range(size):
            if to != rank:
                sent[rank] += len(plan.sends(rank))  # all-to-all: chunk number `to` of each partial sum
                sent[rank] += 1  # all-gather: the chunk it has finished
    for rank in range(size):
        assert plan.traffic(rank) == pytest.approx(sent[rank] / size)
    assert sum(len(plan.sends(rank)) for rank in range(size)) == len(plan.arrivals()) == len(plan.additions()) + 1


@pytest.mark.parametrize(
    ("leaves", "size"), [(leaves, 1 << k) for leaves in (8, 12, 61, 100, 128) for k in range(8) if 1 << k <= leaves]
)
def test_aligned_spans_send_as_much_as_a_ring_all_reduce(leaves: int, size: int) -> None:
    plan = Plan(leaves, assign_evenly(leaves, size))
    # a power of two of processes: one subtree each, whatever V is
    assert [len(plan.sends(rank)) for rank in range(size)] == [1] * size
    assert [plan.traffic(rank) for rank in range(size)] == [2 * (size - 1) / size] * size


@quick
@given(st.integers(1, 9), st.integers(1, 5), st.data())
def test_no_assignment_that_ends_as_early_sends_less(leaves: int, size: int, data: st.DataObject) -> None:
    """Compared with all assignments of small numbers: earliest end first, then fewest partial sums."""
    seconds = data.draw(st.lists(st.sampled_from([1.0, 1.5, 2.0, 5.0]), min_size=size, max_size=size))

    def judge(spans: assignment.Spans) -> tuple[float, int]:
        end = max((hi - lo) * s for (lo, hi), s in zip(spans, seconds, strict=True))
        return end, sum(len(subtrees(leaves, lo, hi)) or assignment._IDLE_COST for lo, hi in spans)

    def every(at: int, left: int) -> Any:
        if left == 1:
            yield ((at, leaves),)
            return
        for to in range(at, leaves + 1):
            for rest in every(to, left - 1):
                yield ((at, to), *rest)

    assert judge(assign(leaves, seconds)) == min(judge(spans) for spans in every(0, size))


def test_processes_beyond_the_virtual_ranks_get_nothing() -> None:
    spans = assign_evenly(8, 12)
    assert sum(lo == hi for lo, hi in spans) == 4
    assert sorted(span for span in spans if span[0] < span[1]) == [(i, i + 1) for i in range(8)]


def test_a_faster_process_gets_more() -> None:
    assert [hi - lo for lo, hi in assign(8, [1.0, 3.0])] == [6, 2]
    assert [hi - lo for lo, hi in assign(8, [1.0, 1.0])] == [4, 4]
    assert [hi - lo for lo, hi in assign(8, [1.0, 100.0])] == [8, 0]


def test_the_example_in_the_docstring() -> None:
    plan = Plan(6, ((0, 4), (4, 6)))
    assert plan.arrivals() == (Node(0, 3), Node(3, 4), Node(4, 6))
    assert plan.additions() == ((1, 2), (0, 1))


@quick
@given(st.lists(st.floats(-1e6, 1e6), max_size=30))
def test_a_chain_adds_from_left_to_right(values: list[float]) -> None:
    total = 0.0
    for value in values:
        total = total + value
    assert chain(values) == total


def test_numbers_only() -> None:
    """plan/ imports no torch, no clock and no processes."""
    for module in (rng_keys, reduction_tree, assignment):
        assert not {"torch", "time", "os", "random", "socket"} & set(vars(module))
