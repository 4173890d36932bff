"""Compare two ways to compute the same steps, in blocks of steps that alternate.

    block        0       1       2       3       4       5
    way         old     new     new     old     old     new
    pair        '---0---'       '---1---'       '---2---'

The two blocks of a pair follow each other, so a machine that becomes slower in between changes both. The order within
the pairs alternates, so a steady trend cancels. The first step after a change does not count: it allocates memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

NEW_BLOCKS = (1, 2, 5)
"""The blocks that are computed in the new way."""

PAIRS = ((0, 1), (3, 2), (4, 5))
"""The blocks that are compared: (old, new)."""

BLOCK_SECONDS = 0.25
"""Steps of a block take about this long together, at least."""

FEWEST, MOST = 2, 20
"""Limits of the number of steps of a block that count."""

CLEARLY_LESS = 0.98
"""A way is used if its steps take less than this part of the time."""


class Verdict(NamedTuple):
    """The result of a trial.

    Attributes:
        ratio: The time of a step in the new way, over that in the old way: the median of the pairs.
        pays: Whether the new way is clearly faster.
    """

    ratio: float
    pays: bool


class PairedTrial:
    """One trial, from step `first` on.

    Args:
        first: The first step.
        seconds: The time of a step, from which the number of steps in a block follows.

    Attributes:
        end: The first step after the trial.
    """

    def __init__(self, first: int, seconds: float) -> None:
        counted = math.ceil(BLOCK_SECONDS / seconds) if seconds > 0 else MOST
        self.first, self.length = first, 1 + min(max(counted, FEWEST), MOST)
        self.end = first + 2 * len(PAIRS) * self.length
        self._seconds: list[list[float]] = [[] for _ in range(2 * len(PAIRS))]

    def is_new(self, step: int) -> bool:
        """Return whether a step is computed in the new way."""
        return (step - self.first) // self.length in NEW_BLOCKS

    def record(self, step: int, seconds: float) -> None:
        """Record the time of a step of the trial. The first step of a block does not count."""
        block, place = divmod(step - self.first, self.length)
        if place:
            self._seconds[block].append(seconds)

    def medians(self) -> list[float]:
        """Return the median time of a step of each block; infinity for a block without times."""
        return [median(each) if each else math.inf for each in self._seconds]


def judge(seconds: Sequence[float]) -> Verdict:
    """Compare the blocks of a trial.

    Args:
        seconds: The time of a step of each block, on the slowest process. Infinity: not measured.
    """
    ratios = [seconds[new] / seconds[old] for old, new in PAIRS if math.isfinite(seconds[new]) and seconds[old] > 0]
    if len(ratios) < len(PAIRS) or not all(map(math.isfinite, seconds)):
        return Verdict(1.0, pays=False)
    return Verdict(median(ratios), pays=median(ratios) < CLEARLY_LESS and max(ratios) < 1.0)
