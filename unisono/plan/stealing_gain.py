"""Whether virtual ranks are claimed within a step: decided by all processes from the same numbers. Numbers only.

Claiming helps where a process is slow now and then and nobody knows which one it will be. It costs: sums leave when all
is computed, instead of in the midst of the last backward, and every claim is a question. So it is tried when the past
steps say that it would have paid, kept when it does, and left alone for longer and longer when it does not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from unisono.plan.assignment import Spans
from unisono.plan.load_balance import FIRST, end

WINDOW = 16
"""Steps that one way is judged by."""

HOPE = 1.15
"""How much longer steps must take than they would if nobody waited, for a try."""

PAYS = 0.97
"""A step with claims takes at most so much of one without, or they are left."""

REST, LONG_REST = 64, 4096
"""Steps until the next try, after one that did not pay; twice as many each time."""


class StealingGain:
    """`on` says whether the next step's virtual ranks are to be claimed."""

    def __init__(self) -> None:
        self.on = False
        self._waits = deque[float](maxlen=WINDOW)  # a step's time over what it would be if nobody waited
        self._walls = deque[float](maxlen=WINDOW)
        self._before = float("inf")  # a step's seconds without claims
        self._rest, self._left, self._steps = REST, 0, 0

    def hear(self, spans: Spans, seconds: Sequence[float], wall: float) -> bool:
        """A step is over: it took `wall` seconds, and a virtual rank took seconds[r] on process r (0: it had none).
        Returns whether to claim in the next one."""
        self._steps += 1
        if self._steps <= FIRST:
            return self.on
        took = [s or max(seconds) for s in seconds]
        alone = sum(hi - lo for lo, hi in spans) / sum(1 / s for s in took if s) if any(took) else 0.0
        self._waits.append(end(spans, took) / alone if alone else 1.0)
        self._walls.append(wall)
        self._left = max(self._left - 1, 0)
        if self._left or len(self._walls) < WINDOW:
            return self.on
        typical = sum(self._waits) / WINDOW
        if not self.on and typical > HOPE:
            self._before = median(self._walls)
            self._turn(on=True, rest=0)
        elif self.on and median(self._walls) > PAYS * self._before:
            self._turn(on=False, rest=self._rest)
            self._rest = min(2 * self._rest, LONG_REST)
        elif self.on and typical < HOPE:  # nobody is slow any more
            self._turn(on=False, rest=0)
        return self.on

    def _turn(self, *, on: bool, rest: int) -> None:
        self.on, self._left = on, rest
        self._waits.clear()
        self._walls.clear()
