"""The time of a step under a placement: micro-batches, update, and the rest.

    a step = micro-batches of the busiest process x seconds of one + update + rest

On one process all three are measured. For each number of processes two short runs are measured as well, with replicas
and with shards that are gathered layer by layer. They show what no count of operations does: how much slower a process
computes while others compute as well, how much of the exchange the last backward pass hides, and what a gather costs.
The other placements follow from these:

    load     a micro-batch among n replicas, over one on a process alone
    extra    a micro-batch among n shards, less load x one alone: two gathers of all layers and one scatter

Recomputation changes the micro-batch alone. Shards that are gathered once a step need a third of `extra`, once. Groups
of shards gather among fewer processes, while all processes compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from unisono.costs.recorded_costs import RecordedCosts, StepSeconds
from unisono.plan.assignment import assign_evenly

TRANSFERS = 3
"""Transfers of all layers in a micro-batch, if shards are gathered layer by layer: two gathers and one scatter."""


@dataclass(frozen=True)
class Machine:
    """What short runs on this machine took.

    Attributes:
        alone: The time of a step on one process; None: it was not measured.
        replicas: The time of a step of replicas, by their number.
        shards: The time of a step of one replica in shards that are gathered layer by layer, by their number.
        cores: Cores that processes share, for numbers of processes that were not measured; 0: each has a device.
    """

    alone: StepSeconds | None = None
    replicas: Mapping[int, StepSeconds] = field(default_factory=dict)
    shards: Mapping[int, StepSeconds] = field(default_factory=dict)
    cores: int = 0

    def load(self, processes: int, threads: int) -> float:
        """Return the factor by which a process computes slower than alone."""
        if self.alone is not None and processes in self.replicas:
            return self.replicas[processes].round / self.alone.round
        return max(1.0, processes * threads / self.cores) if self.cores else 1.0

    def extra(self, shards: int, threads: int) -> float:
        """Return the seconds that a micro-batch takes longer in shards than in replicas."""
        assert self.alone is not None
        return self.shards[shards].round - self.load(shards, threads) * self.alone.round


def rounds_of_busiest(micro_batches: tuple[int, ...], spans: int, turns: int = 1) -> int:
    """Return the most micro-batches that a process computes in a step.

    Args:
        micro_batches: The number of micro-batches of each virtual rank.
        spans: The number of spans that virtual ranks are divided into.
        turns: The number of processes that compute a span in turn.
    """
    found = assign_evenly(len(micro_batches), spans)
    return max(-(-sum(micro_batches[lo:hi]) // turns) for lo, hi in found)


def seconds_of(
    costs: RecordedCosts, machine: Machine, *, replicas: int = 1, shards: int = 1, by_layer: bool = True
) -> float | None:
    """Return the seconds of a step; None: what it follows from was not measured."""
    size = replicas * shards
    if size == 1 or costs.seconds is None or machine.alone is None:
        return costs.step_seconds if size == 1 else None
    load = machine.load(size, costs.threads)
    turns = shards if by_layer else 1
    rounds = rounds_of_busiest(costs.micro_batches, size // turns, turns)
    computing = rounds * load * costs.seconds.round
    among, parts = machine.replicas.get(size), machine.shards.get(shards)
    if shards == 1:
        return None if among is None else computing + among.update + among.rest
    if parts is None or (among is None and not (by_layer and replicas == 1)):
        return None
    busier = load / machine.load(shards, costs.threads)  # messages on one machine are work of its processors, too
    extra, update = busier * machine.extra(shards, costs.threads), busier * parts.update
    if not by_layer:
        assert among is not None
        return computing + extra / TRANSFERS + update + among.rest
    exchange = among.rest / shards if among is not None and replicas > 1 else 0.0
    return computing + rounds * extra + update + busier * parts.rest + exchange
