"""What a placement takes, and the order of placements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unisono.costs.memory_model import MeasuredPeaks, MemoryParts, memory_of
from unisono.costs.placements import Placement
from unisono.costs.recorded_costs import RecordedCosts
from unisono.costs.time_model import ShortRuns, seconds_of


@dataclass(frozen=True)
class Candidate:
    """A placement with what it takes.

    Attributes:
        placement: The placement.
        memory: The memory of a process by part; None: it is not known.
        seconds: The time of a step; None: it was not measured.
        samples: The samples of a step.
        trials: The short runs of this placement; 0: its time follows from those of others.
    """

    placement: Placement
    memory: MemoryParts | None
    seconds: float | None
    samples: int
    trials: int = 0

    def fits(self, limit: int | None) -> bool:
        """Return whether a process needs at most `limit` bytes; None: there is no limit."""
        return limit is None or self.memory is None or self.memory.total <= limit


def candidate(
    placement: Placement, costs: RecordedCosts, runs: ShortRuns, peaks: MeasuredPeaks | None = None
) -> Candidate:
    """Return what a placement takes. `costs` are those of one process with the same setting for recomputation."""
    memory = memory_of(costs, placement, peaks) if costs.rounds is not None else None
    return Candidate(placement, memory, seconds_of(costs, runs, placement), costs.samples)


def ranked(candidates: Sequence[Candidate], limit: Mapping[int, int] | None = None) -> list[Candidate]:
    """Return those that fit, quickest first. Among equally quick ones, fewer processes and less memory come first.

    Args:
        candidates: The candidates.
        limit: The bytes that a process may use, by the number of processes; None: any.
    """
    fitting = [each for each in candidates if each.fits(limit[each.placement.processes] if limit else None)]

    def key(each: Candidate) -> tuple[float, int, int]:
        seconds = each.seconds if each.seconds is not None else float("inf")
        return seconds, each.placement.processes, each.memory.total if each.memory is not None else 0

    return sorted(fitting, key=key)
