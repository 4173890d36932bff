"""Dealing by speed, where the step is: how long this process took, and what all of them make of it.

    process 0   [ v0 v1 v2 v3 v4 v5 ]              the table   (seconds for a virtual rank, first step nobody dealt for)
    process 1   [ v6 v7 ] ........ slow            --------->  of every process: the same numbers, the same decision

What each says rides along with the step's table, so listening costs no message. A new deal holds from the first step
for which no process has fetched anything: what was fetched ahead is computed where it lies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING

from unisono import phases
from unisono.score.dealing import Dealer

if TYPE_CHECKING:
    from unisono.data.loader import Schedule
    from unisono.score.placement import Spans

WORDS = 2
"""What each process says of itself: seconds for one virtual rank (0: it computed none), its horizon."""


class Dealing:
    """share  samples of a virtual rank, on average
    note   where a line for people goes
    deals  what was decided: (first step, virtual ranks of each process)
    """

    def __init__(self, virtual_ranks: int, spans: Spans, share: float, note: Callable[[str], None]) -> None:
        self.dealer = Dealer(virtual_ranks, spans)
        self.share, self.note = share, note
        self.deals: list[tuple[int, list[int]]] = []
        self._began = self._waited = self._took = 0.0
        self._told: tuple[int, ...] = ()

    def begin(self) -> None:
        """A pass begins: the first of its micro-batches is about to be fetched."""
        self._began, self._waited = time.perf_counter(), phases.Waited.seconds

    def end(self, samples: int) -> None:
        """All micro-batches of this process are computed. Waiting for others in the midst of them is no work."""
        busy = time.perf_counter() - self._began - (phases.Waited.seconds - self._waited)
        self._took = busy / samples * self.share if samples else 0.0

    def say(self, horizon: int) -> tuple[float, float]:
        return self._took, float(horizon)

    def hear(self, said: Sequence[Sequence[float]], schedule: Schedule) -> None:
        """A step is over, and everybody has said how long it took: deal anew, if that pays."""
        seconds = [took for took, _ in said]
        spans = self.dealer.hear(seconds)
        if spans is None:
            return
        first, counts = int(max(horizon for _, horizon in said)), [hi - lo for lo, hi in spans]
        schedule.change(first, spans)
        self.deals.append((first, counts))
        self.note(f"from step {first} on the processes compute {', '.join(map(str, counts))} virtual ranks, by speed")
        if self.dealer.slow and self.dealer.slow != self._told:
            self.note(self._about_slow(seconds))
        self._told = self.dealer.slow

    def _about_slow(self, seconds: Sequence[float]) -> str:
        slow = self.dealer.slow
        took, others = (median(s for r, s in enumerate(seconds) if (r in slow) == of and s) for of in (True, False))
        return (
            f"{'Rank' if len(slow) == 1 else 'Ranks'} {', '.join(map(str, slow))} would take {1000 * took:.3g} ms for "
            f"a virtual rank, where the others take {1000 * others:.3g}: they are done sooner without help, and "
            f"--ranks {len(seconds) - len(slow)} would be as fast."
        )
