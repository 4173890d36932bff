"""Work stealing: if a process is unexpectedly slow in a step, idle processes take over its virtual ranks.

    process 0   | v0 | v1  v2  v3 | v6        home: v0 .. v3; finishes first, takes the last one of process 1
    process 1   | v4 | v5 ........|           home: v4 .. v7; slow in this step
                     '-- from here on a process draws a ticket for each virtual rank

The home of a process are the virtual ranks that are assigned to it. Every process begins with the first quarter of its
home, which no other process can take. Then it draws a ticket for each virtual rank. There are as many tickets as
virtual ranks, and a process that gets no ticket is finished. A process takes virtual ranks of its own home from the
front, and of other homes from the back. A ticket is a number that the store of the run counts: one request of about ten
microseconds. A process fetches the micro-batches of a stolen virtual rank itself; if the owner has fetched them ahead,
it drops them.

The sum does not depend on the process that computes a virtual rank (exchange/tree/dynamic_tree.py), and random numbers
are keyed. So the bits are those of a step without stealing.
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
        """Observe the times of a step after its end."""


class WorkStealing:
    """Decide which process computes which virtual rank within a step. Every process of the run has one such object.

    on      whether stealing pays in the next step
    steps   number of steps in which virtual ranks could be stolen
    guests  number of virtual ranks that this process computed for others
    """

    def __init__(self, rank: int, tickets: SharedCounter) -> None:
        self.rank, self.tickets = rank, tickets
        self.gain = StealingGain()
        self.steps = self.guests = 0
        self.on = False

    def virtual_ranks_of(self, step: int, spans: Spans, busy: Sequence[int]) -> Iterator[tuple[int, bool]]:
        """Yield (virtual rank, whether it is at home) for each virtual rank that this process computes.

        All processes call this in the same steps.

        Args:
            step: number of the step.
            spans: the home of each process.
            busy: virtual ranks that have micro-batches.
        """
        homes = [[v for v in busy if lo <= v < hi] for lo, hi in spans]
        size = len(homes)
        self.steps += 1
        self._renew((step + 1) % 2)  # no process draws these tickets before the end of this step
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
        if was and not self.on:  # no process draws until stealing is on again, a joint decision
            self._renew(0, 1)

    def _renew(self, *turns: int) -> None:
        for turn in turns:
            self.tickets.renew(f"{turn}", f"{turn} back")


def _parts(home: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Return the virtual ranks of a home that no other process can take, and those that any process may take."""
    sure = -(-len(home) // 4)
    return home[:sure], home[sure:]
