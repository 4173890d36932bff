"""The curve of a learning-rate range test: rates, smoothing, the end of a test, and the rates that follow."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest

from unisono.train.lr_range.rate_curve import (
    DIVERGED,
    DivergenceStop,
    ExponentialAverage,
    RateCurve,
    growing_rates,
    smoothed,
    smoothing,
)

COUNT = 100


def curve_of(noise: float = 0.0, seed: int = 0, *, middle: float = -3.0, end: float = -0.5) -> RateCurve:
    """Return a curve that falls from 5 to 1 around 10^middle, and diverges at 10^end."""
    rates = growing_rates(1e-7, 10.0, COUNT)
    draws, losses = random.Random(seed), []
    for rate in rates:
        place = math.log10(rate)
        loss = 1 + 4 / (1 + math.exp(3 * (place - middle))) + math.exp(6 * (place - end)) + draws.gauss(0, noise)
        losses.append(loss)
    return RateCurve.of([[rate, loss] for rate, loss in zip(rates, losses, strict=True)], COUNT)


def test_rates_grow_by_one_factor() -> None:
    rates = growing_rates(1e-7, 10.0, COUNT)
    assert (rates[0], rates[-1]) == pytest.approx((1e-7, 10.0))
    factors = [after / before for before, after in pairwise(rates)]
    assert factors == pytest.approx([factors[0]] * 99)


def test_the_average_is_corrected_for_its_start() -> None:
    average = ExponentialAverage(0.9)
    assert [average.add(5.0) for _ in range(3)] == pytest.approx([5.0] * 3)
    average = ExponentialAverage(0.5)
    assert [average.add(value) for value in (1.0, 4.0)] == pytest.approx([1.0, (0.5 * 1 + 1 * 4) / 1.5])


def test_a_smoothed_curve_is_not_late() -> None:
    values = [float(max(0, 50 - abs(place - 50))) for place in range(101)]
    found = smoothed([-value for value in values], 0.8)
    assert min(range(101), key=found.__getitem__) == pytest.approx(50, abs=1)
    assert smoothed([2.0] * 7, 0.9) == pytest.approx([2.0] * 7)
    assert smoothed([], 0.9) == []


def test_a_loss_that_diverges_does_not_raise_those_before_it() -> None:
    falling = [5.0 - 0.1 * place for place in range(40)]
    found = smoothed([*falling, 1e6, 1e9], 0.8)
    assert max(found) <= 5.0
    assert found[20] == pytest.approx(smoothed(falling, 0.8)[20], abs=0.1)


@pytest.mark.parametrize("middle", [-4.0, -3.0, -2.0])
def test_the_steepest_descent_is_found(middle: float) -> None:
    for seed in range(20):
        curve = curve_of(0.2, seed, middle=middle)
        steepest, lowest = curve.steepest, curve.lowest
        assert steepest is not None
        assert lowest is not None
        assert math.log10(curve.rates[steepest]) == pytest.approx(middle, abs=0.6)
        assert middle < math.log10(curve.rates[lowest]) < -0.4


def test_the_end_of_a_test() -> None:
    stop = DivergenceStop(0.0)
    assert [stop.diverges(loss) for loss in (4.0, 1.0, DIVERGED, DIVERGED + 0.01)] == [False, False, False, True]
    assert DivergenceStop(0.9).diverges(math.nan)
    assert DivergenceStop(0.9).diverges(math.inf)
    stop = DivergenceStop(smoothing(COUNT))
    assert not stop.diverges(1.0)
    assert not stop.diverges(6.0), "one bad batch does not end it"
    negative = DivergenceStop(0.0)
    assert not any(negative.diverges(loss) for loss in (-1.0, -5.0, 100.0)), (
        "a multiple of a loss below 0 means nothing"
    )


def test_no_rate_is_suggested_without_a_descent() -> None:
    rising = RateCurve([10.0**n for n in range(20)], [float(n) for n in range(20)], 20)
    assert rising.steepest is None
    short = RateCurve([1.0, 2.0, 3.0], [3.0, 2.0, 1.0], COUNT)
    assert (short.lowest, short.steepest) == (None, None)
    assert short.suggested(peak=True) is None
    assert short.as_json()["steepest"] is None


def test_a_peak_may_be_as_high_as_the_rate_of_the_lowest_loss() -> None:
    curve = curve_of()
    assert curve.suggested(peak=True) == curve.lowest != curve.steepest == curve.suggested(peak=False)
    rising = RateCurve([10.0**n for n in range(20)], [float(n) for n in range(20)], 20)
    assert rising.suggested(peak=True) is None


def test_a_curve_ends_before_a_loss_that_is_not_finite() -> None:
    assert RateCurve.of([[1.0, 5.0], [2.0, None], [3.0, 4.0]], COUNT).losses == [5.0]
    assert RateCurve.of([[1.0, math.inf]], COUNT).losses == []
