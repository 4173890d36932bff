"""The clock behind "where the time went": seconds in each phase.

An observer of `phases`. A change of phase costs it two dictionary accesses and one look at the system's counter, about
0.15 µs; a training step has some ten changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from unisono import phases


class PhaseClock:
    """Adds up the seconds that this process spends in each phase between `start` and `stop`.

    `now` returns seconds from any origin, never going back; tests pass their own.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._seconds: dict[str, float] = dict.fromkeys(phases.PHASES, 0.0)
        self._lap: dict[str, float] = dict(self._seconds)
        self._begin, self._change = _stopwatch(self._seconds, now)
        self._running = False

    def start(self) -> PhaseClock:
        """Begin, or go on after a stop; starting twice changes nothing."""
        if not self._running:
            self._running = True
            self._begin()
            phases.observe(self._change)
        return self

    def stop(self) -> None:
        """Hold on; what has been counted stays."""
        if self._running:
            self._up_to_now()
            phases.unobserve(self._change)
            self._running = False

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds per phase, up to this moment, with every phase of PHASES; a copy."""
        self._up_to_now()
        return dict(self._seconds)

    @property
    def total(self) -> float:
        """Seconds in all phases together: the time between `start` and now, or `stop`."""
        self._up_to_now()
        return sum(self._seconds.values())

    def share(self, phase: str) -> float:
        """The part of the total that went to `phase`, 0 to 1."""
        total = self.total
        return self._seconds[phase] / total if total > 0 else 0.0

    def lap(self) -> dict[str, float]:
        """Seconds per phase since the last `lap` (or the start), only the phases that took any: a step's line."""
        self._up_to_now()
        before, self._lap = self._lap, self._seconds.copy()
        return {phase: s - before[phase] for phase, s in self._lap.items() if s != before[phase]}

    def _up_to_now(self) -> None:
        if self._running:
            here = phases.now()
            self._change(here, here)


def _stopwatch(seconds: dict[str, float], now: Callable[[], float]) -> tuple[Callable[[], None], phases.Observer]:
    """Two functions that share one variable: a closure costs half of what a method does, and this runs all the time."""
    since = 0.0

    def begin() -> None:
        nonlocal since
        since = now()

    def change(left: str, _entered: str) -> None:
        nonlocal since
        moment = now()
        seconds[left] += moment - since
        since = moment

    return begin, change
