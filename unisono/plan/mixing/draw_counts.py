"""How many samples a mixture has drawn from each source before a step: a pure function of the weights up to that step.

The sources are the leaves of a binary tree. Each node divides the samples that it gets between its two children, by the
weights below them. A node adds up, in whole numbers, the share of its left child, and rounds the sum, not each step:

    weights 0.5 0.3 0.2, 1 sample a step          ( 10 )        after 10 steps
                                                 5      5
                                                     3     2

So after any number of steps a source has been drawn as often as the sum of its weights says, up to half a sample for
each level of the tree, and another half there for each time that the shares below a node change by 1 in total. A step
is a sum away from the one before. Where weights do not change for a while, all its steps are one sum.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

UNIT = 1 << 30
"""Weights are kept as multiples of 1/UNIT, so that every machine rounds alike."""

FRACTION_BITS = 32
"""Bits after the point of a node's sum."""

ANCHOR = 1024
"""Least number of steps between two sums that are kept."""

Weights = tuple[int, ...]
"""A weight of each source, in units of 1/UNIT."""


class WeightSchedule(Protocol):
    """The weights at each step."""

    def at(self, step: int) -> Weights:
        """Return the weights of a step."""

    def next_change(self, step: int) -> int | None:
        """Return the first step after this one at which the weights may be others; None: there is none."""


@dataclass(frozen=True)
class WeightTable:
    """Weights that change at some steps.

    Attributes:
        first: the first step of each row, in order; the first one is 0.
        rows: the weights from that step on.
    """

    first: tuple[int, ...]
    rows: tuple[Weights, ...]

    def at(self, step: int) -> Weights:
        return self.rows[bisect_right(self.first, step) - 1]

    def next_change(self, step: int) -> int | None:
        row = bisect_right(self.first, step)
        return self.first[row] if row < len(self.first) else None


@dataclass(frozen=True)
class WeightFunction:
    """Weights that a function computes for each step."""

    compute: Callable[[int], Weights]

    def at(self, step: int) -> Weights:
        return self.compute(step)

    def next_change(self, step: int) -> int | None:
        return step + 1


def whole_weights(weights: Sequence[float]) -> Weights:
    """Return weights in units of 1/UNIT. Their sum is about UNIT.

    Raises:
        ValueError: a weight is negative or not finite, or all of them are 0.
    """
    values = [float(weight) for weight in weights]
    if wrong := [value for value in values if not (math.isfinite(value) and value >= 0)]:
        raise ValueError(f"A weight is {wrong[0]}")
    total = math.fsum(values)
    if not 0 < total < math.inf:
        raise ValueError(f"The sum of the weights is {total}")
    whole = tuple(round(value / total * UNIT) for value in values)
    if not any(whole):
        raise ValueError("All weights round to 0")
    return whole


@dataclass
class DrawCounts:
    """Samples that a mixture has drawn from each source before each step.

    Attributes:
        sources: number of sources.
        schedule: the weights.
        samples: returns the number of samples of the whole run before a step.
    """

    sources: int
    schedule: WeightSchedule
    samples: Callable[[int], int]
    _known: list[int] = field(default_factory=lambda: [0])  # steps, in order, at which the sums are known
    _sums: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _latest: tuple[int, tuple[int, ...]] = (0, ())

    def __post_init__(self) -> None:
        half = 1 << (FRACTION_BITS - 1)  # so that sums are rounded, not cut off
        self._sums[0] = (half,) * (self.sources - 1)
        self._latest = 0, self._sums[0]

    def before(self, step: int) -> tuple[int, ...]:
        """Return how many samples the steps before this one draw from each source."""
        at, sums = self._nearest(step)
        while at < step:
            change = self.schedule.next_change(at)
            following = step if change is None else min(change, step)
            sums = self._advance(sums, at, following)
            at = following
            if at == change and at >= self._known[-1] + ANCHOR:
                self._known.append(at)
                self._sums[at] = sums
        self._latest = at, sums
        return self._leaves(sums, self.samples(step))

    def _nearest(self, step: int) -> tuple[int, tuple[int, ...]]:
        known = self._known[bisect_right(self._known, step) - 1]
        at, sums = self._latest
        return (at, sums) if known <= at <= step else (known, self._sums[known])

    def _advance(self, sums: tuple[int, ...], at: int, to: int) -> tuple[int, ...]:
        """Return the sums of the nodes before step `to`, from those before step `at`; the weights are those of `at`."""
        ends = [0]
        for weight in self.schedule.at(at):
            ends.append(ends[-1] + weight)
        new = list(sums)
        pending = [(0, self.sources, self.samples(to) - self.samples(at))]
        while pending:
            low, high, drawn = pending.pop()
            if high - low < 2 or not drawn:
                continue
            middle = (low + high) // 2
            share = ((ends[middle] - ends[low]) << FRACTION_BITS) // (ends[high] - ends[low])
            new[middle - 1] += drawn * share
            left = (new[middle - 1] >> FRACTION_BITS) - (sums[middle - 1] >> FRACTION_BITS)
            pending += [(low, middle, left), (middle, high, drawn - left)]
        return tuple(new)

    def _leaves(self, sums: tuple[int, ...], total: int) -> tuple[int, ...]:
        """Return the samples of each source. The node that divides [low, high) has the sum at its middle - 1."""
        counts = [0] * self.sources
        pending = [(0, self.sources, total)]
        while pending:
            low, high, drawn = pending.pop()
            if high - low == 1:
                counts[low] = drawn
                continue
            middle = (low + high) // 2
            left = sums[middle - 1] >> FRACTION_BITS
            pending += [(low, middle, left), (middle, high, drawn - left)]
        return tuple(counts)
