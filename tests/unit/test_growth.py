"""The plan of many processes, without processes: its result on 1,024 and 16,384 ranks, and its bounds."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.plan.assignment import NARROW_ABOVE, assign, assign_evenly
from unisono.plan.reduction_tree import Plan, count_subtrees, subtrees

SIZES = [(1024, 1024), (4096, 1000), (16384, 16384), (32768, 12000)]


def speeds(size: int) -> list[float]:
    """Return seconds per virtual rank of processes of which no two neighbors are equally fast."""
    return [1.0 + (7919 * rank % 1009) / 1009 for rank in range(size)]


@pytest.mark.parametrize(("virtual_ranks", "size"), SIZES)
@pytest.mark.parametrize("even", [True, False])
def test_a_plan_of_many_ranks_is_bounded_by_the_tree(virtual_ranks: int, size: int, even: bool) -> None:
    spans = assign_evenly(virtual_ranks, size) if even else assign(virtual_ranks, speeds(size))
    assert [spans[0][0], *(hi for _, hi in spans)] == [*(lo for lo, _ in spans), virtual_ranks]
    plan = Plan(virtual_ranks, spans)
    sent = [len(plan.sends(rank)) for rank in range(size)]
    assert max(sent) <= 2 * virtual_ranks.bit_length()  # of each process: O(log V)
    assert len(plan.additions()) == sum(sent) - 1 < 2 * virtual_ranks  # in all: O(V), not O(ranks^2)


@given(st.integers(1, 60), st.lists(st.floats(0.01, 50.0), min_size=1, max_size=20))
def test_the_slowest_process_ends_as_early_as_possible(virtual_ranks: int, seconds: list[float]) -> None:
    spans = assign(virtual_ranks, seconds)
    end = max((hi - lo) * s for (lo, hi), s in zip(spans, seconds, strict=True))
    ends = sorted({n * s for s in seconds for n in range(virtual_ranks + 1)})
    before = [each for each in ends if each < end]
    if before:  # no assignment ends earlier
        fits = sum(max(n for n in range(virtual_ranks + 1) if n * s <= before[-1]) for s in seconds)
        assert fits < virtual_ranks


def test_many_processes_end_as_early_as_few() -> None:
    """Above NARROW_ABOVE processes, fewer choices are compared, and the end of the slowest is the same."""
    size = NARROW_ABOVE + 44
    seconds = speeds(size)
    spans = assign(4 * size, seconds)
    end = max((hi - lo) * s for (lo, hi), s in zip(spans, seconds, strict=True))
    counts = sorted(n * s for s in seconds for n in range(1, 20))
    assert end == counts[4 * size - 1]  # 4 * size virtual ranks are done at the 4 * size-th end


@pytest.mark.parametrize("leaves", [1, 2, 3, 7, 12, 16, 33])
def test_subtrees_are_counted_without_a_list(leaves: int) -> None:
    for lo in range(leaves + 1):
        for hi in range(lo, leaves + 1):
            assert count_subtrees(leaves, lo, hi) == len(subtrees(leaves, lo, hi))


def test_spans_are_consecutive() -> None:
    assert all(one[1] == other[0] for one, other in pairwise(assign(1000, speeds(300))))
