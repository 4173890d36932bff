"""Rounds of trials, and the processes of each trial. Numbers only.

The draws of a study depend on the results that a sampler has seen, so trials are asked for in rounds: those of a round
see the results of earlier rounds, and nothing of each other. The processes that compute a trial change only its time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple


def round_of(number: int, size: int) -> range:
    """Return the trials of the round with this trial, for rounds of this size."""
    first = number - number % size
    return range(first, first + size)


def rounds(trials: int, size: int) -> list[range]:
    """Return the trials of every round of a study."""
    return [range(first, min(first + size, trials)) for first in range(0, trials, size)]


def share(processes: int, at_once: int, unfinished: int) -> int:
    """Return the number of processes for a trial that starts.

    Args:
        processes: The number of processes of the study.
        at_once: The largest number of trials side by side.
        unfinished: The number of trials of the round that have not finished.
    """
    return max(1, processes // max(1, min(at_once, unfinished)))


class RunningTrial(NamedTuple):
    """A trial that is running.

    Attributes:
        number: Its number.
        ranks: The number of its processes.
        virtual_ranks: The largest number of processes, among which its work is divided.
        seconds: The time that it still needs with these processes; None: not known yet.
    """

    number: int
    ranks: int
    virtual_ranks: int
    seconds: float | None


@dataclass
class MoveTimes:
    """The time that a move takes, as this study has measured it.

    Attributes:
        starts: Seconds from the start of a run to its first step.
        moves: Seconds from the signal that stopped a trial to the first step of the trial on more processes.
    """

    starts: list[float] = field(default_factory=list)
    moves: list[float] = field(default_factory=list)

    @property
    def expected_seconds(self) -> float:
        """The median of the moves. Before the first one, that of the starts, since a move contains one."""
        return median(self.moves or self.starts or [0.0])

    def as_json(self) -> Mapping[str, float | None]:
        """Return the number of moves, and their median time."""
        return {"moves": len(self.moves), "move_seconds": median(self.moves) if self.moves else None}


def larger(trials: Sequence[RunningTrial], free: int, restart_seconds: float) -> Mapping[int, int]:
    """Return the trials that continue on more processes, with the number of their processes.

    The slowest process computes ceil(virtual ranks / processes) virtual ranks, and the time of a step is taken to be
    proportional to it. A trial moves if that saves more time than its restart takes. Those with most time left come
    first.

    Args:
        trials: All trials that are running.
        free: The number of processes that no trial uses.
        restart_seconds: The time from the end of a process to the first step of the next one.
    """
    found: dict[int, int] = {}
    candidates = sorted((t for t in trials if t.seconds is not None), key=lambda t: (-(t.seconds or 0.0), t.number))
    while candidates and free > 0:
        trial = candidates.pop(0)
        most = min(trial.virtual_ranks, trial.ranks + -(-free // (len(candidates) + 1)))
        work = -(-trial.virtual_ranks // trial.ranks)
        less = -(-trial.virtual_ranks // most)
        if less >= work:
            continue
        ranks = next(n for n in range(trial.ranks + 1, most + 1) if -(-trial.virtual_ranks // n) == less)
        if (trial.seconds or 0.0) * (1 - less / work) > restart_seconds:
            found[trial.number] = ranks
            free -= ranks - trial.ranks
    return found


def taken(slots: int, used: Sequence[int], count: int) -> tuple[int, ...]:
    """Return the first `count` of `slots` places that are not among the used ones."""
    free = [slot for slot in range(slots) if slot not in set(used)]
    assert len(free) >= count, "a trial starts only where there is room"
    return tuple(free[:count])
