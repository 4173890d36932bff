"""Claims: in a step in which nobody knows who will be slow, virtual ranks go to whoever is free.

    process 0   | v0 | v1  v2  v3 | v6        home: v0 .. v3; done first, takes the last one of another's
    process 1   | v4 | v5 ........|           home: v4 .. v7; slow in this step
                     '-- from here on whoever takes a virtual rank draws a ticket for it

Every process begins with the first quarter of its home, for which nobody asks. Then it draws a ticket for each: there
are as many as virtual ranks, and who gets none leaves. At home they are taken from the front, by guests from the back,
so they meet somewhere. Tickets are numbers that the store counts, where all processes meet: one question, some ten
microseconds. A guest fetches what it has claimed by itself; what was fetched ahead at home is dropped.

The sum does not notice (exchange/tree/dynamic_tree.py), and randomness is keyed: the bits are those of any other step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from unisono.distributed.membership.shared_counter import SharedCounter
from unisono.plan.assignment import Spans
from unisono.plan.stealing_gain import StealingGain


class WorkStealing:
    """Who takes which virtual rank in a step. Every process of the run has one."""

    def __init__(self, rank: int, tickets: SharedCounter) -> None:
        self.rank, self.tickets = rank, tickets
        self.mode = StealingGain()
        self.steps = 0  # in which virtual ranks were claimed
        self.guests = 0  # virtual ranks that this process computed for others
        self.on = False

    def virtual_ranks_of(self, step: int, spans: Spans, busy: Sequence[int]) -> Iterator[tuple[int, bool]]:
        """The virtual ranks that this process computes in `step`, each with whether it is at home; `busy` are those
        with work. Every process must go through it in the same steps."""
        homes = [[v for v in busy if lo <= v < hi] for lo, hi in spans]
        size = len(homes)
        self.steps += 1
        self._renew((step + 1) % 2)  # nobody draws those before this step is over
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
        """A step is over (plan/stealing_gain.py)."""
        was, self.on = self.on, self.mode.hear(spans, seconds, wall)
        if was and not self.on:  # nobody draws until it is on again, which all of them hear together
            self._renew(0, 1)

    def _renew(self, *turns: int) -> None:
        for turn in turns:
            self.tickets.renew(f"{turn}", f"{turn} back")


def _parts(home: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """The virtual ranks that nobody can take away from a home, and those that anybody may claim."""
    sure = -(-len(home) // 4)
    return home[:sure], home[sure:]
