"""Dealing by speed: from how long the processes take, who computes which virtual ranks from now on. Numbers only.

Every process hears the same numbers, so all of them decide the same without another message. A deal never changes a bit
of the result, only when it comes; so this may be as bold as it likes, and is careful for another reason: a machine that
is merely noisy must not have its virtual ranks moved to and fro.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from unisono.plan.assignment import Spans, assign

WINDOW = 12
"""Steps that a process is judged by. The quickest quarter of them counts: who is slow now and then, whatever it does,
is not slow; who is slow is so in nearly all of them."""

FIRST = 3
"""Steps at the beginning that nobody is judged by: memory is allocated, kernels are chosen."""

GAIN = 0.1
"""What a new deal must promise to save of a step."""

REST, LONG_REST = 16, 1024
"""Steps between two deals at least. Who deals again soon after the last time rests twice as long, up to the second."""


class LoadBalancer:
    """Listens to how long a virtual rank takes on each process, and deals anew when that pays.

    spans  what each process computes now
    slow   processes that get nothing, because the others are done sooner without their help
    """

    def __init__(self, virtual_ranks: int, spans: Spans) -> None:
        self.virtual_ranks, self.spans = virtual_ranks, spans
        self.slow: tuple[int, ...] = ()
        self.typical: list[float] = []  # seconds for a virtual rank on each process, when it was last dealt anew
        self._heard = [deque[float](maxlen=WINDOW) for _ in spans]
        self._steps = 0  # that were heard of
        self._rest, self._dealt = REST, 0  # how long, and since which of these steps

    def hear(self, seconds: Sequence[float]) -> Spans | None:
        """A step is over, in which process r took seconds[r] for a virtual rank (0: it computed none). Returns the new
        spans, if there are to be any."""
        self._steps += 1
        if self._steps <= FIRST:
            return None
        for known, took in zip(self._heard, seconds, strict=True):
            if took > 0:
                known.append(took)
        if self._steps - self._dealt < self._rest or any(len(known) < WINDOW for known in self._heard):
            return None
        typical = self._typical()
        best = assign(self.virtual_ranks, typical)
        if end(best, typical) > (1 - GAIN) * end(self.spans, typical):
            return None
        soon = self._dealt > 0 and self._steps - self._dealt < 4 * self._rest
        self._rest = min(2 * self._rest, LONG_REST) if soon else REST
        self._dealt, self.spans, self.typical = self._steps, best, typical
        self.slow = tuple(rank for rank, (lo, hi) in enumerate(best) if lo == hi)
        return best

    def _typical(self) -> list[float]:
        """Seconds for a virtual rank on each process. Who has had none for a long rest may have become quicker: it is
        given the benefit of the doubt, and one more look."""
        known = [sorted(heard)[WINDOW // 4] for heard in self._heard]
        if self._steps - self._dealt >= 4 * self._rest:
            for rank in self.slow:
                known[rank] = median(known)
        return known


def end(spans: Spans, seconds: Sequence[float]) -> float:
    """When the last process is done with its span, if a virtual rank takes seconds[r] on process r."""
    return max((hi - lo) * took for (lo, hi), took in zip(spans, seconds, strict=True))
