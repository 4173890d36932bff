"""Decide whether processes steal work (virtual ranks) within a step. All decide alike, from the same numbers.

Work stealing helps where processes are slow now and then, and not predictably the same ones. It has costs: partial sums
are sent when all leaves are computed, instead of during the last backward pass, and every claim is a request. So it is
tried when the past steps suggest a gain, and kept if there is one. The pause before the next trial grows each time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from unisono.plan.assignment import Spans
from unisono.plan.load_balance import WARMUP_STEPS, end

WINDOW = 16
"""Steps by which a mode is judged."""

MIN_WAITING = 1.15
"""Stealing is tried if steps take this many times as long as they would if no process waited."""

MAX_RATIO = 0.97
"""Stealing is kept if a step takes at most this share of one without it."""

PAUSE, LONGEST_PAUSE = 64, 4096
"""Steps until the next trial after one without a gain; doubled each time."""


class StealingGain:
    """Decide after each step about the next one. `on`: whether the next step's virtual ranks may be stolen."""

    def __init__(self) -> None:
        self.on = False
        self._waiting = deque[float](maxlen=WINDOW)  # a step's time over what it would be if no process waited
        self._step_seconds = deque[float](maxlen=WINDOW)
        self._without = float("inf")  # a step's seconds without stealing
        self._pause, self._paused, self._steps = PAUSE, 0, 0

    def record(self, spans: Spans, seconds: Sequence[float], step_seconds: float) -> bool:
        """Record a step. Return whether to steal in the next one.

        Args:
            spans: the assignment in this step.
            seconds: for a virtual rank on each process; 0 if it computed none.
            step_seconds: of the whole step.
        """
        self._steps += 1
        if self._steps <= WARMUP_STEPS:
            return self.on
        took = [s or max(seconds) for s in seconds]
        ideal = sum(hi - lo for lo, hi in spans) / sum(1 / s for s in took if s) if any(took) else 0.0
        self._waiting.append(end(spans, took) / ideal if ideal else 1.0)
        self._step_seconds.append(step_seconds)
        self._paused = max(self._paused - 1, 0)
        if self._paused or len(self._step_seconds) < WINDOW:
            return self.on
        typical = sum(self._waiting) / WINDOW
        if not self.on and typical > MIN_WAITING:
            self._without = median(self._step_seconds)
            self._switch(on=True, pause=0)
        elif self.on and median(self._step_seconds) > MAX_RATIO * self._without:
            self._switch(on=False, pause=self._pause)
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        elif self.on and typical < MIN_WAITING:  # no process is slow any more
            self._switch(on=False, pause=0)
        return self.on

    def _switch(self, *, on: bool, pause: int) -> None:
        self.on, self._paused = on, pause
        self._waiting.clear()
        self._step_seconds.clear()
