"""Work stealing: in a step in which some process is slow without warning, idle processes take its virtual ranks.

    process 0   | v0 | v1  v2  v3 | v6        home: v0 .. v3; done first, takes the last one of process 1
    process 1   | v4 | v5 ........|           home: v4 .. v7; slow in this step
                     '-- from here on a process draws a ticket for each virtual rank

Every process begins with the first quarter of its home, which no other process can take. Then it draws a ticket for
each virtual rank. There are as many tickets as virtual ranks, and a process without one is done. At home virtual ranks
are taken from the front, by guests from the back, so they meet somewhere. A ticket is a number that the store of the
run counts: one request of some ten microseconds. A guest fetches the micro-batches itself; what was fetched ahead at
home is dropped.

The sum does not depend on it (exchange/tree/dynamic_tree.py), and randomness is keyed: the bits are those of any other
step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from unisono.distributed.membership.shared_counter import SharedCounter
from unisono.plan.assignment import Spans
from unisono.plan.stealing_gain import StealingGain


class NoWorkStealing:
    """Every process computes its own virtual ranks."""

    on = False
    steps = 0

    def virtual_ranks_of(self, step: int, spans: Spans, busy: Sequence[int]) -> Iterator[tuple[int, bool]]:
        raise AssertionError("no virtual rank is taken from another process")

    def observe(self, spans: Spans, seconds: Sequence[float], wall: float) -> None:
        """End a step."""


class WorkStealing:
    """Decide which process computes which virtual rank within a step. Every process of the run has one.

    on      whether it pays in the next step
    steps   steps in which virtual ranks could be taken
    guests  virtual ranks that this process computed for others
    """

    def __init__(self, rank: int, tickets: SharedCounter) -> None:
        self.rank, self.tickets = rank, tickets
        self.gain = StealingGain()
        self.steps = self.guests = 0
        self.on = False

    def virtual_ranks_of(self, step: int, spans: Spans, busy: Sequence[int]) -> Iterator[tuple[int, bool]]:
        """Yield (virtual rank, whether it is at home) of what this process computes. All processes call it in the same
        steps.

        Args:
            step: number of the step.
            spans: the home of each process.
            busy: virtual ranks that have micro-batches.
        """
        homes = [[v for v in busy if lo <= v < hi] for lo, hi in spans]
        size = len(homes)
        self.steps += 1
        self._renew((step + 1) % 2)  # no process draws those before this step is over
        for home in [(self.rank + i) % size for i in range(size)]:
            sure, open_ones = _parts(homes[home])
            if home == self.rank:
                for virtual_rank in sure:
                    yield virtual_rank, True
            front = 0
            while open_ones and self.tickets.next(str(step % 2), home) <= len(open_ones):
                if home == self.rank:
                    yield open_ones[front], True
                    front += 1
                else:
                    self.guests += 1
                    yield open_ones[-self.tickets.next(f"{step % 2} back", home)], False

    def observe(self, spans: Spans, seconds: Sequence[float], wall: float) -> None:
        """Decide after a step whether stealing pays in the next one (plan/stealing_gain.py)."""
        was, self.on = self.on, self.gain.record(spans, seconds, wall)
        if was and not self.on:  # no process draws until it is on again, which all of them decide together
            self._renew(0, 1)

    def _renew(self, *turns: int) -> None:
        for turn in turns:
            self.tickets.renew(f"{turn}", f"{turn} back")


def _parts(home: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Return the virtual ranks of a home that no other process can take, and those that any process may take."""
    sure = -(-len(home) // 4)
    return home[:sure], home[sure:]
