"""The curve of a learning-rate range test: losses by rate, smoothed, and the rates that follow from it.

The test is that of Smith (Cyclical Learning Rates for Training Neural Networks, 2017, arXiv 1506.01186, section 3.3).
The suggestion is the rate at which the loss falls most steeply over the logarithm of the rate, as `steep` of fastai.
For the peak of a one-cycle schedule it is the rate of the lowest loss. Numbers only, without torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

MEMORY = 1 / 20
"""The memory of the exponential average, as a part of all rates."""

LEAST_SMOOTHING = 0.5
"""The least weight of earlier losses."""

DIVERGED = 4.0
"""The test ends when the smoothed loss is above this many times its minimum."""

LEAST_POINTS = 10
"""The least number of finite losses from which rates follow."""


def smoothing(count: int) -> float:
    """Return the weight of earlier losses in the average, for a test with this many rates."""
    return max(LEAST_SMOOTHING, 1 - 1 / (MEMORY * count))


def growing_rates(first: float, last: float, count: int) -> list[float]:
    """Return `count` rates from the first to the last one, each by the same factor above the one before."""
    return [first * (last / first) ** (number / (count - 1)) for number in range(count)]


class ExponentialAverage:
    """A bias-corrected exponential average: the weights of all values add up to 1, as in Adam (Kingma and Ba 2015)."""

    def __init__(self, weight: float) -> None:
        self._weight, self._sum, self._count = weight, 0.0, 0

    def add(self, value: float) -> float:
        """Add a value, and return the average."""
        self._count += 1
        self._sum = self._weight * self._sum + (1 - self._weight) * value
        return self._sum / (1 - self._weight**self._count)


class DivergenceStop:
    """Notice that a loss has diverged: the smoothed one is above `DIVERGED` times its minimum, or not finite.

    Args:
        weight: The weight of earlier losses in the average.
    """

    def __init__(self, weight: float) -> None:
        self._average, self._least = ExponentialAverage(weight), math.inf

    def diverges(self, loss: float) -> bool:
        """Add a loss, and return whether the test ends with it."""
        if not math.isfinite(loss):
            return True
        now = self._average.add(loss)
        self._least = min(self._least, now)
        return self._least > 0 and now > DIVERGED * self._least


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """Return the mean of two exponential averages, forward and backward in time, so that the curve is not late.

    Values above all of those before the minimum of the forward average are limited to the largest of these. Otherwise
    a loss that diverges would raise the losses before it.
    """
    forward, backward = ExponentialAverage(weight), ExponentialAverage(weight)
    there = [forward.add(value) for value in values]
    lowest = min(range(len(there)), key=there.__getitem__, default=0)
    most = max(values[: lowest + 1], default=0.0)
    limited = [min(value, most) for value in values]
    back = [backward.add(value) for value in reversed(limited)][::-1]
    forward = ExponentialAverage(weight)
    return [(forward.add(value) + other) / 2 for value, other in zip(limited, back, strict=True)]


@dataclass(frozen=True)
class RateCurve:
    """The curve of a test.

    Args:
        rates: The rates of the updates, which grow.
        losses: The loss after each of these updates, of the next batch.
        count: The number of rates that the test was to try.
    """

    rates: Sequence[float]
    losses: Sequence[float]
    count: int

    @classmethod
    def of(cls, points: Sequence[Sequence[float | None]], count: int) -> RateCurve:
        """Return the curve up to the first loss that is not finite. `points`: [rate, loss or None] of each update."""
        rates, losses = [], []
        for rate, loss in points:
            if rate is None or loss is None or not math.isfinite(loss):
                break
            rates.append(rate)
            losses.append(loss)
        return cls(rates, losses, count)

    @cached_property
    def smoothed(self) -> list[float]:
        """The smoothed losses."""
        return smoothed(self.losses, smoothing(self.count))

    @property
    def lowest(self) -> int | None:
        """The place of the lowest smoothed loss; None: there are fewer points than `LEAST_POINTS`."""
        if len(self.losses) < LEAST_POINTS:
            return None
        values = self.smoothed
        return min(range(len(values)), key=values.__getitem__)

    @property
    def steepest(self) -> int | None:
        """The place before the minimum at which the smoothed loss falls most steeply; None: it does not fall."""
        lowest = self.lowest
        if lowest is None or lowest < 2:
            return None
        values = self.smoothed
        places = [math.log(rate) for rate in self.rates]
        slopes = {i: (values[i + 1] - values[i - 1]) / (places[i + 1] - places[i - 1]) for i in range(1, lowest)}
        best = min(slopes, key=slopes.__getitem__)
        return best if slopes[best] < 0 else None

    def suggested(self, *, peak: bool) -> int | None:
        """Return the place of the suggested rate; None: the loss does not fall.

        Args:
            peak: Whether the rate is the peak of a one-cycle schedule. That is held for a few steps only, after a
                warm-up, and may be as high as the rate of the lowest loss.
        """
        return self.lowest if peak and self.steepest is not None else self.steepest

    def as_json(self) -> dict[str, Any]:
        """Return the curve and its two rates for JSON."""
        lowest, steepest = self.lowest, self.steepest
        return {
            "steepest": self.rates[steepest] if steepest is not None else None,
            "minimum": self.rates[lowest] if lowest is not None else None,
            "rates": list(self.rates),
            "losses": list(self.losses),
            "smoothed": self.smoothed,
        }
