"""Blocks of steps alternate between two ways, and a way is used only if it is clearly faster."""

from __future__ import annotations

import math

import pytest

from unisono.train.replan.paired_trial import FEWEST, MOST, NEW_BLOCKS, PairedTrial, judge


@pytest.mark.parametrize(("seconds", "counted"), [(10.0, FEWEST), (0.05, 5), (1e-4, MOST), (0.0, MOST)])
def test_a_block_has_one_step_more_than_count(seconds: float, counted: int) -> None:
    trial = PairedTrial(7, seconds)
    assert trial.length == counted + 1
    assert trial.end == 7 + 6 * trial.length


def test_half_of_the_steps_are_computed_in_the_new_way() -> None:
    trial = PairedTrial(100, 1.0)
    ways = [trial.is_new(step) for step in range(trial.first, trial.end)]
    assert sum(ways) == len(ways) // 2
    assert not ways[0]
    assert [ways[block * trial.length] for block in range(6)] == [block in NEW_BLOCKS for block in range(6)]


def test_the_first_step_of_a_block_does_not_count() -> None:
    trial = PairedTrial(0, 1.0)
    for step in range(trial.end):
        trial.record(step, 99.0 if step % trial.length == 0 else 1.0 + step // trial.length)
    assert trial.medians() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("seconds", "pays"),
    [
        ([1.0, 0.8, 0.8, 1.0, 1.0, 0.8], True),
        ([1.0, 0.99, 0.99, 1.0, 1.0, 0.99], False),  # not clearly
        ([1.0, 0.8, 0.8, 1.0, 1.0, 1.1], False),  # not in all pairs
        ([1.0, 1.2, 1.2, 1.0, 1.0, 1.2], False),
        ([1.0, 1.1, 1.2, 1.3, 1.4, 1.5], False),  # the machine becomes slower
        ([1.0, 0.8, math.inf, 1.0, 1.0, 0.8], False),
        ([0.0] * 6, False),
    ],
)
def test_a_way_pays_if_all_pairs_say_so(seconds: list[float], pays: bool) -> None:
    verdict = judge(seconds)
    assert verdict.pays is pays
    assert math.isfinite(verdict.ratio)


def test_the_ratio_is_the_median_of_the_pairs() -> None:
    assert judge([1.0, 0.5, 0.9, 1.0, 1.0, 0.7]).ratio == 0.7
