"""Loss spikes: a step whose loss is far above that of the steps before it. Numbers only.

Far is ten times as far from their median as half of them are, and half of that median at least: a noisy loss needs a
higher peak than a smooth one. (The median and its deviation, which a few spikes do not move; Hampel, The influence
curve and its role in robust estimation, 1974.) What follows a spike within as many steps is the same spike.
"""

from __future__ import annotations

from collections import deque
from statistics import median

WINDOW = 64
"""Steps that the next one is compared with, and until the next spike is told."""

LEAST = 16
"""Before that many nothing is a spike: the loss of a beginning falls."""

FAR, PART = 10.0, 0.5

LOOK = 16
"""Steps between two looks at the median: sorting takes longer than all else here."""


class LossSpikes:
    """Hears every step's loss."""

    def __init__(self) -> None:
        self._losses = deque[float](maxlen=WINDOW)
        self._heard = 0
        self._quiet = 0  # until so many were heard, nothing is told
        self._typical = self._limit = float("inf")

    def observe(self, loss: float) -> float | None:
        """The loss of the next step. If it is a spike: the median of those before it."""
        found = self._typical if self._limit < loss < float("inf") and self._heard >= self._quiet else None
        if found is not None:
            self._quiet = self._heard + WINDOW
        self._losses.append(loss)
        self._heard += 1
        if self._heard >= LEAST and self._heard % LOOK == 0:
            self._typical = median(self._losses)
            spread = median([abs(other - self._typical) for other in self._losses])
            self._limit = self._typical + max(FAR * spread, PART * abs(self._typical))
        return found
