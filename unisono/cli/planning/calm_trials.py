"""Repeat trials that other programs disturb, and keep the one that was disturbed least.

A trial is disturbed if other programs used some of the cores while its steps were timed, and no core was idle. The
records of steps have these CPU times (train/costs/cpu_time.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

SHARE = 0.05
"""The share of all cores that other programs may use."""

BUSY = 0.9
"""The share of all cores above which programs wait for each other."""

MOST_REPEATS = 6
"""The most repeats of all trials together: on a machine that stays busy, they do not help."""


def used_by_others(ranks: Sequence[Mapping[str, Any]], cores: int) -> float:
    """Return how many cores other programs used while the steps of a trial were timed; 0.0: they did not disturb it.

    Args:
        ranks: The records of all processes of the trial (train/costs/step_costs.py).
        cores: The number of cores of this machine.
    """
    known = [rank["cpu"] for rank in ranks if rank.get("cpu") and rank["cpu"]["seconds"] > 0]
    if not known:
        return 0.0
    machine = max(each["machine"] / each["seconds"] for each in known)
    others = machine - sum(each["own"] / each["seconds"] for each in known)
    return others if machine > BUSY * cores and others > SHARE * cores else 0.0


@dataclass
class CalmTrials:
    """Run trials until other programs do not disturb them, a few times at most.

    Args:
        cores: The number of cores of this machine.
        repeats: How many repeats are left for all trials together.

    Attributes:
        most: The most cores that other programs used in a trial that was kept.
    """

    cores: int
    repeats: int = MOST_REPEATS
    most: float = 0.0

    def calmest(self, run: Callable[[], T], records: Callable[[T], Sequence[Mapping[str, Any]]]) -> T:
        """Return the result of a trial, the least disturbed one of several.

        Args:
            run: Run the trial.
            records: Return the records of its processes.
        """
        best, disturbed = (found := run()), used_by_others(records(found), self.cores)
        while disturbed and self.repeats > 0:
            self.repeats -= 1
            found = run()
            if (now := used_by_others(records(found), self.cores)) < disturbed:
                best, disturbed = found, now
        self.most = max(self.most, disturbed)
        return best

    def notes(self) -> list[str]:
        """Return a note for the report if other programs disturbed a trial that was kept, else an empty list."""
        if not self.most:
            return []
        return [
            f"Other programs used {self.most:.1f} of {self.cores} cores while steps were timed: times may be wrong."
        ]
