"""Where a row of links is cut: the dearest stage is as cheap as it can be, and every other cut was looked at."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from unisono.parallel.pipeline_parallel.stage_balance import BalancedRow, balanced_partition


def row(costs: list[int], *, widths: list[int] | None = None, trains: list[bool] | None = None) -> BalancedRow:
    return BalancedRow(costs, trains or [True] * len(costs), widths or [1] * len(costs))


def dearest(costs: list[int], begins: list[int]) -> int:
    return max(sum(costs[a:b]) for a, b in zip(begins, [*begins[1:], len(costs)], strict=True))


def test_the_dearest_stage_is_as_cheap_as_it_can_be() -> None:
    assert balanced_partition(row([3, 1, 1, 1, 3, 3]), 2) == [0, 4]
    assert balanced_partition(row([1, 1, 1, 1]), 4) == [0, 1, 2, 3]
    assert balanced_partition(row([9, 1, 1, 1]), 2) == [0, 1]
    assert balanced_partition(row([5]), 1) == [0]


def test_every_stage_trains_something() -> None:
    costs, trains = [1, 8, 8, 1, 1], [True, False, False, False, True]
    assert balanced_partition(row(costs, trains=trains), 2) == [0, 2]
    assert balanced_partition(row([0, 0, 4], trains=[True, True, False]), 2) == [0, 1]


def test_of_cuts_that_are_alike_the_narrowest_is_taken() -> None:
    """A clock says 100 and 102 where it might as well say 101 twice."""
    costs, widths = [50, 50, 2, 50, 50], [0, 2, 2, 1, 2]
    assert balanced_partition(row(costs, widths=widths), 2, alike=0.05) == [0, 3]
    assert balanced_partition(row([50, 50, 0, 50, 50], widths=widths), 2) == [0, 3]
    assert balanced_partition(row([49, 50, 3, 48, 50], widths=widths), 2) == [0, 2]


@pytest.mark.parametrize("seed", range(20))
def test_no_other_cut_is_better(seed: int) -> None:
    dice = random.Random(seed)
    count, stages = dice.randint(3, 9), dice.randint(1, 3)
    costs = [dice.randint(0, 20) for _ in range(count)]
    widths = [0, *(dice.randint(1, 3) for _ in range(count - 1))]
    every = [[0, *begins] for begins in combinations(range(1, count), stages - 1)]
    least = min(dearest(costs, begins) for begins in every)
    for alike in (0.0, 0.2):
        found = balanced_partition(row(costs, widths=widths), stages, alike)
        assert dearest(costs, found) <= least * (1 + alike)
        near = [begins for begins in every if dearest(costs, begins) <= least * (1 + alike)]
        assert sum(widths[i] for i in found) == min(sum(widths[i] for i in begins) for begins in near)
