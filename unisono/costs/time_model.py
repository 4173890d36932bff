"""The time of a step under a placement: micro-batches, update, and the rest.

    a step = micro-batches of the busiest process x seconds of one + update + rest

Short runs measure all three for one process and for each placement of several. They show what no count of operations
does: how much slower a process computes while others compute as well, how much of the exchange the last backward pass
hides, and what a gather costs. Recomputation is measured on one and two processes. On more of them, where it was not
measured, it makes a micro-batch longer, as much as on two, and nothing else.

    load     a micro-batch among n replicas, over one on a process alone
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from unisono.costs.placements import Placement
from unisono.costs.recorded_costs import RecordedCosts, StepSeconds
from unisono.plan.assignment import assign_evenly


@dataclass(frozen=True)
class ShortRuns:
    """What short runs on this machine took.

    Attributes:
        alone: The time of a step on one process; None: it was not measured.
        together: The time of a step, by the placement. With recomputation, those of some are enough.
        cores: Cores that processes share, for numbers of replicas that were not measured; 0: each has a device.
    """

    alone: StepSeconds | None = None
    together: Mapping[Placement, StepSeconds] = field(default_factory=dict)
    cores: int = 0

    def load(self, processes: int, threads: int) -> float:
        """Return the factor by which a process computes slower than alone."""
        replicas = self.together.get(Placement(processes))
        if self.alone is not None and replicas is not None:
            return replicas.round / self.alone.round
        return max(1.0, processes * threads / self.cores) if self.cores else 1.0


def rounds_of_busiest(micro_batches: tuple[int, ...], placement: Placement) -> int:
    """Return the most micro-batches that a process computes in a step.

    Args:
        micro_batches: The number of micro-batches of each virtual rank.
        placement: The placement.
    """
    found = assign_evenly(len(micro_batches), placement.spans)
    turns = placement.processes // placement.spans
    return max(-(-sum(micro_batches[lo:hi]) // turns) for lo, hi in found)


def seconds_of(costs: RecordedCosts, runs: ShortRuns, placement: Placement) -> float | None:
    """Return the seconds of a step; None: what it follows from was not measured.

    Args:
        costs: What one process needed, with the same setting for recomputation.
        runs: What was measured.
        placement: The placement.
    """
    rounds = rounds_of_busiest(costs.micro_batches, placement)
    measured = runs.together.get(placement)
    if measured is not None:
        return measured.step(rounds)
    if placement.processes == 1:
        return costs.step_seconds
    plain = runs.together.get(placement.without_recompute)
    if plain is None or costs.seconds is None or runs.alone is None:
        return None
    return plain.step(rounds) + rounds * _recompute_seconds(costs, runs, placement)


def _recompute_seconds(costs: RecordedCosts, runs: ShortRuns, placement: Placement) -> float:
    """Return by how many seconds recomputation makes a micro-batch longer."""
    pair, load = placement.pair, runs.load(placement.processes, costs.threads)
    again, plain = runs.together.get(pair), runs.together.get(pair.without_recompute)
    if again is not None and plain is not None:
        return (again.round - plain.round) * load / runs.load(pair.processes, costs.threads)
    assert costs.seconds is not None
    assert runs.alone is not None
    return (costs.seconds.round - runs.alone.round) * load
