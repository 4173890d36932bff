"""The ledger of asynchronous training: the step of each worker, and the next gradient to use. Numbers only.

Every step of the run is computed once and counts once, in whatever order the workers request steps:

    worker 1   [ step 0 ][ step 2        ][ step 5 ]
    worker 2   [ step 1            ][ step 4  ] died: step 4 is assigned again
    worker 3   [ step 3 ]...                      [ step 4 ]
    updates             0  1   2      3

The *lateness* of a gradient is the number of updates between the parameters with which it was computed and its own
update. With a bound, no gradient is later than the bound. Ho et al. ("More effective distributed ML via a stale
synchronous parallel parameter server", NIPS 2013) let fast workers wait for slow ones, and count how many steps a
worker is ahead. The ledger counts updates instead, because a gradient misses updates and not steps. A gradient that has
arrived waits if its use could make an older gradient too late:

    let v1 <= v2 <= ... be the versions of the outstanding gradients, and n the number of updates. If the gradients are
    used in this order, the lateness of number i is n + i - 1 - vi. No lateness exceeds the bound when a step is
    assigned (at most bound + 1 are outstanding). This remains true when the oldest gradient is used, and is checked
    before a newer one is used.

A worker that holds up the others for much longer than a gradient usually takes is overtaken: its step is assigned
again, and its late gradient is dropped. So a worker that hangs does not stop the run, neither under a bound nor when
its step is the last missing one.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

PATIENCE = 4.0
"""Multiple of the usual time of a gradient for which a worker may hold up the others."""

LEAST_SECONDS = 0.5
"""The least time for which a worker may hold up the others."""


@dataclass
class OutstandingWork:
    """A step that is assigned to a worker."""

    number: int
    version: int  # number of updates in its parameters
    since: float  # seconds, of any clock
    here: bool = False  # whether its gradient has arrived


class Ledger:
    """The steps `first` to `last` - 1, after `first` updates.

    version  number of updates
    late     total lateness of the used gradients; `latest`: the largest one
    again    number of steps that were assigned a second time; `dropped`: gradients that arrived after that
    """

    def __init__(self, first: int, last: int, bound: int | None) -> None:
        self.first, self.last, self.bound = first, last, bound
        self.version = first
        self.late = self.latest = self.again = self.dropped = 0
        self.out: dict[int, OutstandingWork] = {}
        self._done: set[int] = set()  # of the steps from `_begin` on
        self._begin = self._next = first
        self._back: list[int] = []
        self._arrived: list[int] = []  # workers, in the order in which their gradients arrived
        self._took: deque[float] = deque(maxlen=99)

    @property
    def is_over(self) -> bool:
        return self.version >= self.last

    # -- events of workers

    def hand(self, worker: int, now: float) -> int | None:
        """Return the next step for a worker, or None if there is none now."""
        assert worker not in self.out
        if self._back:
            number = heapq.heappop(self._back)
        else:
            while self._next in self._done:
                self._next += 1
            if self._next >= self.last:
                return None
            number, self._next = self._next, self._next + 1
        self.out[worker] = OutstandingWork(number, self.version, now)
        return number

    def arrive(self, worker: int, number: int, now: float) -> bool:
        """Record that a worker's gradient has arrived. Return whether it is used."""
        out = self.out.get(worker)
        if out is None or out.number != number:
            self.dropped += 1
            return False
        out.here = True
        self._arrived.append(worker)
        self._took.append(now - out.since)
        return True

    def lose(self, worker: int) -> int | None:
        """Record that a worker is gone. Return its step if that is assigned again, else None."""
        out = self.out.get(worker)
        if out is None or out.here:
            return None
        del self.out[worker]
        heapq.heappush(self._back, out.number)
        self.again += 1
        return out.number

    def overtake(self, now: float, *, idle: bool) -> list[int]:
        """Return workers that have held up the others for too long. Their steps are assigned again.

        Args:
            now: seconds, of the clock of `hand`.
            idle: whether a worker waits for a step.
        """
        if not (idle or self._arrived) or self.turn() is not None or not self._took:
            return []
        patience = max(LEAST_SECONDS, PATIENCE * median(self._took))
        found = [worker for worker, out in self.out.items() if not out.here and now - out.since > patience]
        for worker in found:
            self.lose(worker)
        return found

    # -- events of the server

    def turn(self) -> int | None:
        """Return the worker whose gradient is used next: the first to arrive of those that may be used; or None."""
        return next((worker for worker in self._arrived if self._may(self.out[worker])), None)

    def _may(self, out: OutstandingWork) -> bool:
        """Return whether all older gradients could still arrive in time if this one is used now."""
        if self.bound is None:
            return True
        older = sorted(other.version for other in self.out.values() if other.version < out.version)
        return all(self.version + i - version <= self.bound for i, version in enumerate(older, 1))

    def use(self, worker: int) -> None:
        """Record an update with a worker's gradient."""
        out = self.out.pop(worker)
        self._arrived.remove(worker)
        late = self.version - out.version
        self.late, self.latest = self.late + late, max(self.latest, late)
        self.version += 1
        self._done.add(out.number)
        while self._begin in self._done:
            self._done.remove(self._begin)
            self._begin += 1

    # -- in a checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Return which steps are done: all below `begin`, and those in `done`."""
        return {"updates": self.version, "begin": self._begin, "done": sorted(self._done)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from this state, unless it is out of date because the run has used another exchange since."""
        if state["updates"] == self.version:
            self._begin = self._next = state["begin"]
            self._done = set(state["done"])
