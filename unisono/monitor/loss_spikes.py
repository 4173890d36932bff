"""Detect loss spikes: a step whose loss is far above that of the steps before it.

A spike exceeds their median by more than ten times the median absolute deviation, and by more than half of the median.
So a noisy loss needs a higher peak than a smooth one. (A few spikes change neither statistic; Hampel, The influence
curve and its role in robust estimation, 1974.) Losses within WINDOW steps after a spike belong to the same spike.
"""

from __future__ import annotations

from collections import deque
from statistics import median

WINDOW = 64
"""Steps that the next one is compared with, and steps until the next spike is reported."""

MIN_STEPS = 16
"""Steps before the first one that can be a spike, because a loss falls quickly at first."""

DEVIATIONS, PART = 10.0, 0.5
"""Smallest height of a spike above the median: in median absolute deviations, and as a part of the median."""

INTERVAL = 16
"""Steps between two computations of the median, which takes longer than everything else here."""


class LossSpikes:
    """Observes the loss of every step.

    Attributes:
        found: The number of spikes until now.
    """

    def __init__(self) -> None:
        self.found = 0
        self._losses = deque[float](maxlen=WINDOW)
        self._count = 0
        self._quiet_until = 0  # number of losses before which no spike is reported
        self._typical = self._limit = float("inf")

    def observe(self, loss: float) -> float | None:
        """Add the loss of the next step. Returns the median of those before it if it is a spike, otherwise None."""
        found = self._typical if self._limit < loss < float("inf") and self._count >= self._quiet_until else None
        if found is not None:
            self._quiet_until = self._count + WINDOW
            self.found += 1
        self._losses.append(loss)
        self._count += 1
        if self._count >= MIN_STEPS and self._count % INTERVAL == 0:
            self._typical = median(self._losses)
            spread = median([abs(other - self._typical) for other in self._losses])
            self._limit = self._typical + max(DEVIATIONS * spread, PART * abs(self._typical))
        return found
