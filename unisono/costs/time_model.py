"""The time of a step under a placement: micro-batches, messages, update.

    a step = load x (micro-batches of the busiest process x seconds of one + update) + messages

`load` says how much slower a process computes while the others compute as well, because they share cores and memory.
Messages are measured on this machine between as many processes, at the size of the model's gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from unisono.costs.recorded_costs import RecordedCosts
from unisono.plan.assignment import assign_evenly

GATHERS = 2
"""How often a layer is gathered for a micro-batch, if its shards are gathered layer by layer: forward and backward."""


@dataclass(frozen=True)
class MeasuredLinks:
    """The time of collectives among some processes of this machine.

    Attributes:
        exchange: Seconds in which the processes exchange one gradient along the tree.
        gather: Seconds in which they gather all parameters.
        scatter: Seconds in which each gets its part of all gradients.
    """

    exchange: float = 0.0
    gather: float = 0.0
    scatter: float = 0.0


ALONE = MeasuredLinks()


@dataclass(frozen=True)
class Machine:
    """The processors and links that a placement uses.

    Attributes:
        cores: Cores that processes share; 0: each process has a device of its own.
        links: The measured links, by the number of processes.
        loads: The measured slowdown of a micro-batch, by the number of processes that compute at the same time.
    """

    cores: int = 0
    links: Mapping[int, MeasuredLinks] = field(default_factory=dict)
    loads: Mapping[int, float] = field(default_factory=dict)

    def load(self, processes: int, threads: int) -> float:
        """Return the factor by which a process computes slower than alone."""
        if processes in self.loads:
            return self.loads[processes]
        return max(1.0, processes * threads / self.cores) if self.cores else 1.0


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
    """Return the seconds of a step; None: micro-batches or messages were not measured."""
    size = replicas * shards
    links = ALONE if size == 1 else machine.links.get(size)
    if costs.round_seconds is None or links is None:
        return None
    load = machine.load(size, costs.threads)
    turns = shards if by_layer else 1
    rounds = rounds_of_busiest(costs.micro_batches, size // turns, turns)
    computing = load * (rounds * costs.round_seconds + costs.update_seconds / shards)
    if shards == 1:
        return computing + links.exchange + costs.other_seconds
    if by_layer:
        exchange = links.exchange / shards if replicas > 1 else 0.0
        return computing + rounds * (GATHERS * links.gather + links.scatter) + exchange + costs.other_seconds
    return computing + links.gather + links.exchange + costs.other_seconds
