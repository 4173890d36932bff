"""Short runs of placements: one of each, and further ones of the quickest.

The speed of a machine may vary, for example if other virtual machines share its cores. A single short run of each
placement cannot rank placements that differ by less. So those that are close to the quickest are measured again,
in turns, and more often where runs of one placement differ. A placement counts with its run of median time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from unisono.costs.candidates import Candidate, candidate
from unisono.costs.memory_model import MeasuredPeaks
from unisono.costs.placements import ONE_PROCESS, Placement
from unisono.costs.recorded_costs import RecordedCosts, StepSeconds
from unisono.costs.time_model import ShortRuns, rounds_of_busiest

CLOSE = 0.2
"""Placements whose step takes at most this share longer than the quickest are close to it."""

VERY_CLOSE = 0.1
"""The same, for placements that were measured as often as wanted."""

STEADY = 0.1
"""Short runs of one placement differ by at most this share on a machine of steady speed."""

MORE = 3
"""The factor by which the number of short runs grows on a machine whose speed varies."""

MOST_CLOSE = 4
"""The most placements that are measured again in one turn."""


class PlacementTrial(NamedTuple):
    """What a step of one short run took: its time, and the largest memory of a process in bytes."""

    seconds: StepSeconds
    peak: int


@dataclass
class PlacementTrials:
    """What short runs took, by the placement.

    Args:
        plain: What one process needed.
        again: What it needed with recomputation; None: this was not measured.
        cores: Cores that processes share; 0: each has a device.
    """

    plain: RecordedCosts
    again: RecordedCosts | None = None
    cores: int = 0
    _found: dict[Placement, list[PlacementTrial]] = field(default_factory=dict)
    _failed: set[Placement] = field(default_factory=set)

    def __post_init__(self) -> None:
        for costs, recompute in ((self.plain, False), (self.again, True)):
            if costs is not None and costs.seconds is not None:
                self.add(Placement(recompute=recompute), PlacementTrial(costs.seconds, costs.peak))

    def add(self, placement: Placement, trial: PlacementTrial | None) -> None:
        """Add a short run; None: the placement failed, and is not measured again."""
        if trial is None:
            self._failed.add(placement)
        else:
            self._found.setdefault(placement, []).append(trial)

    def count(self, placement: Placement) -> int:
        """Return how often a placement was measured; 0: its time follows from that of others."""
        return len(self._found.get(placement, ()))

    def candidate(self, placement: Placement) -> Candidate:
        """Return what a placement takes. Placements with recomputation need `again`."""
        costs = self.again if placement.recompute else self.plain
        assert costs is not None
        found = candidate(placement, costs, self._runs, self._peaks)
        return replace(found, trials=self.count(placement))

    def turn(self, fitting: Sequence[Candidate], wanted: int) -> list[Placement]:
        """Return the placements to measure next, once each; []: the quickest ones have been measured often enough.

        Args:
            fitting: The candidates that fit, quickest first.
            wanted: How often those that are close to the quickest are measured, on a machine of steady speed.
        """
        close = [each.placement for each in self._close(fitting, wanted)]
        if len(close) == 1:
            wanted = 1  # no other placement can take its place
        elif any(self._spread(each) > STEADY for each in close):
            wanted *= MORE
        close = [each for each in close if each not in self._failed]
        return [each for each in close[:MOST_CLOSE] if self.count(each) < wanted]

    def notes(self) -> list[str]:
        """Return a note for the report if short runs of one placement differ by more than `CLOSE`, else []."""
        spreads = {each: self._spread(each) for each, found in self._found.items() if len(found) > 1}
        placement = max(spreads, key=lambda each: spreads[each], default=None)
        if placement is None or spreads[placement] <= CLOSE:
            return []
        return [
            f"Short runs of {placement} differ by {spreads[placement]:.0%}: the speed of this machine varies. "
            "Placements that differ by less may change their order."
        ]

    def _close(self, fitting: Sequence[Candidate], wanted: int) -> list[Candidate]:
        """Return the candidates that may be the quickest."""
        quickest = min((each.seconds for each in fitting if each.seconds is not None), default=0.0)

        def limit(each: Candidate) -> float:
            return (1 + (CLOSE if each.trials < wanted else VERY_CLOSE)) * quickest

        return [each for each in fitting if each.seconds is not None and each.seconds <= limit(each)]

    @property
    def _runs(self) -> ShortRuns:
        seconds = {each: self._median(each).seconds for each in self._found}
        return ShortRuns(seconds.get(ONE_PROCESS), seconds, self.cores)

    @property
    def _peaks(self) -> MeasuredPeaks:
        peaks = {each: max(trial.peak for trial in found) for each, found in self._found.items()}
        return MeasuredPeaks(self.plain, self.again, peaks)

    def _median(self, placement: Placement) -> PlacementTrial:
        found = sorted(self._found[placement], key=lambda trial: self._step(placement, trial))
        return found[(len(found) - 1) // 2]

    def _spread(self, placement: Placement) -> float:
        steps = [self._step(placement, trial) for trial in self._found.get(placement, ())]
        return max(steps) / min(steps) - 1 if steps else 0.0

    def _step(self, placement: Placement, trial: PlacementTrial) -> float:
        return trial.seconds.step(rounds_of_busiest(self.plain.micro_batches, placement))
