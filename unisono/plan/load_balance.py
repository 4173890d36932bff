"""Load balancing: from the times of the processes, decide which virtual ranks each computes. Numbers only.

All processes get the same times, so they make the same decision without another message. The assignment never changes
the result, only the time it takes. It is changed rarely, since a machine that is merely noisy must not have its virtual
ranks moved back and forth.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from unisono.plan.assignment import Spans, assign

WINDOW = 12
"""Steps by which a process is judged. Its quickest quarter counts: a process that is slow now and then is not slow; a
slow one is slow in nearly all steps."""

WARMUP_STEPS = 3
"""Steps at the beginning that are ignored: memory is allocated, and kernels are chosen."""

MIN_GAIN = 0.1
"""The share of a step that a new assignment must save."""

PAUSE, LONGEST_PAUSE = 16, 1024
"""Least number of steps between two changes. It is doubled, up to the second number, if a change follows soon after
another."""


class LoadBalancer:
    """Collect the time of a virtual rank on each process, and change the assignment when that saves time.

    Attributes:
        spans: the present assignment.
        slow: processes that get nothing, because the others end sooner without them.
        typical: seconds for a virtual rank on each process at the last change.
    """

    def __init__(self, virtual_ranks: int, spans: Spans) -> None:
        self.virtual_ranks, self.spans = virtual_ranks, spans
        self.slow: tuple[int, ...] = ()
        self.typical: list[float] = []
        self._seconds = [deque[float](maxlen=WINDOW) for _ in spans]
        self._steps = 0  # recorded
        self._pause, self._changed = PAUSE, 0  # how long, and since which recorded step

    def record(self, seconds: Sequence[float]) -> Spans | None:
        """Record a step. Return the new assignment if it changes.

        Args:
            seconds: for a virtual rank on each process; 0 if it computed none.
        """
        self._steps += 1
        if self._steps <= WARMUP_STEPS:
            return None
        for known, took in zip(self._seconds, seconds, strict=True):
            if took > 0:
                known.append(took)
        if self._steps - self._changed < self._pause or any(len(known) < WINDOW for known in self._seconds):
            return None
        typical = self._typical()
        best = assign(self.virtual_ranks, typical)
        if end(best, typical) > (1 - MIN_GAIN) * end(self.spans, typical):
            return None
        soon = self._changed > 0 and self._steps - self._changed < 4 * self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE) if soon else PAUSE
        self._changed, self.spans, self.typical = self._steps, best, typical
        self.slow = tuple(rank for rank, (lo, hi) in enumerate(best) if lo == hi)
        return best

    def _typical(self) -> list[float]:
        """Return the typical seconds for a virtual rank on each process.

        A process that has computed none for a long time may have become faster. It counts as average, to be tried.
        """
        known = [sorted(times)[WINDOW // 4] for times in self._seconds]
        if self._steps - self._changed >= 4 * self._pause:
            for rank in self.slow:
                known[rank] = median(known)
        return known


def end(spans: Spans, seconds: Sequence[float]) -> float:
    """Return when the last process has computed its span, if a virtual rank takes seconds[r] on process r."""
    return max((hi - lo) * took for (lo, hi), took in zip(spans, seconds, strict=True))
