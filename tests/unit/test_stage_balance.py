"""Partitions into stages: the most expensive stage is as cheap as possible; the test tries all other partitions."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from unisono.parallel.pipeline_parallel.stage_balance import BalancedRow, balanced_partition


def row(costs: list[int], *, widths: list[int] | None = None, trains: list[bool] | None = None) -> BalancedRow:
    return BalancedRow(costs, trains or [True] * len(costs), widths or [1] * len(costs))


def largest_cost(costs: list[int], starts: list[int]) -> int:
    return max(sum(costs[a:b]) for a, b in zip(starts, [*starts[1:], len(costs)], strict=True))


def test_the_most_expensive_stage_is_as_cheap_as_possible() -> None:
    assert balanced_partition(row([3, 1, 1, 1, 3, 3]), 2) == [0, 4]
    assert balanced_partition(row([1, 1, 1, 1]), 4) == [0, 1, 2, 3]
    assert balanced_partition(row([9, 1, 1, 1]), 2) == [0, 1]
    assert balanced_partition(row([5]), 1) == [0]


def test_every_stage_has_parameters_that_train() -> None:
    costs, trains = [1, 8, 8, 1, 1], [True, False, False, False, True]
    assert balanced_partition(row(costs, trains=trains), 2) == [0, 2]
    assert balanced_partition(row([0, 0, 4], trains=[True, True, False]), 2) == [0, 1]


def test_of_equal_partitions_the_one_that_sends_least_is_taken() -> None:
    """Times of 100 and 102 are measurements of 101 and 101."""
    costs, widths = [50, 50, 2, 50, 50], [0, 2, 2, 1, 2]
    assert balanced_partition(row(costs, widths=widths), 2, tolerance=0.05) == [0, 3]
    assert balanced_partition(row([50, 50, 0, 50, 50], widths=widths), 2) == [0, 3]
    assert balanced_partition(row([49, 50, 3, 48, 50], widths=widths), 2) == [0, 2]


@pytest.mark.parametrize("seed", range(20))
def test_no_other_partition_is_better(seed: int) -> None:
    rng = random.Random(seed)
    count, stages = rng.randint(3, 9), rng.randint(1, 3)
    costs = [rng.randint(0, 20) for _ in range(count)]
    widths = [0, *(rng.randint(1, 3) for _ in range(count - 1))]
    candidates = [[0, *starts] for starts in combinations(range(1, count), stages - 1)]
    least = min(largest_cost(costs, starts) for starts in candidates)
    for tolerance in (0.0, 0.2):
        found = balanced_partition(row(costs, widths=widths), stages, tolerance)
        assert largest_cost(costs, found) <= least * (1 + tolerance)
        near = [starts for starts in candidates if largest_cost(costs, starts) <= least * (1 + tolerance)]
        assert sum(widths[i] for i in found) == min(sum(widths[i] for i in starts) for starts in near)
