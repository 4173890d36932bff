"""The placements that a plan compares, and their order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from unisono.costs.memory_model import MeasuredPeaks, MemoryParts, memory_of
from unisono.costs.recorded_costs import RecordedCosts
from unisono.costs.time_model import Machine, seconds_of

NOT_PREDICTED = ("tensor", "pipeline", "context")
"""Axes whose cost depends on how the model computes within a layer: `unisono prove` runs them."""


@dataclass(frozen=True)
class Placement:
    """A way to divide a run over processes.

    Attributes:
        replicas: The number of replicas of the model.
        shards: The number of processes that share one.
        by_layer: Whether shards are gathered layer by layer; otherwise once a step.
        recompute: Whether activations are computed again in the backward pass.
    """

    replicas: int = 1
    shards: int = 1
    by_layer: bool = True
    recompute: bool = False

    @property
    def processes(self) -> int:
        """The number of processes."""
        return self.replicas * self.shards

    @property
    def sets(self) -> tuple[str, ...]:
        """The settings, for --set."""
        found = [f"parallel.shard={self.shards}"] if self.shards > 1 else []
        found += ["parallel.reshard=step"] if self.shards > 1 and not self.by_layer else []
        return (*found, *(["parallel.activation_checkpoint=full"] if self.recompute else []))

    def __str__(self) -> str:
        words = (
            [f"{self.replicas} replica{'s' * (self.replicas != 1)}"] if self.shards == 1 or self.replicas > 1 else []
        )
        words += [f"{self.shards} shards" + ("" if self.by_layer else " (by step)")] if self.shards > 1 else []
        return ", ".join([*words, *(["recompute"] if self.recompute else [])])


@dataclass(frozen=True)
class Candidate:
    """A placement with what it takes.

    Attributes:
        placement: The placement.
        memory: The memory of a process by part; None: it is not known.
        seconds: The time of a step; None: it was not measured.
        samples: The samples of a step.
    """

    placement: Placement
    memory: MemoryParts | None
    seconds: float | None
    samples: int

    def fits(self, limit: int | None) -> bool:
        """Return whether a process needs at most `limit` bytes; None: there is no limit."""
        return limit is None or self.memory is None or self.memory.total <= limit


def counts_up_to(most: int) -> list[int]:
    """Return the numbers of processes to compare: powers of two, and the largest."""
    found = [1]
    while found[-1] * 2 <= most:
        found.append(found[-1] * 2)
    return found if found[-1] == most else [*found, most]


def placements(most: int, *, shards: bool = True, recompute: bool = True) -> Iterator[Placement]:
    """Yield the placements on at most so many processes.

    Args:
        most: The largest number of processes.
        shards: Whether the model can be divided in shards.
        recompute: Whether activations can be computed again.
    """
    for again in (False, True) if recompute else (False,):
        for size in counts_up_to(most):
            yield Placement(size, recompute=again)
            if size == 1 or not shards:
                continue
            for by_layer in (True, False):
                yield Placement(1, size, by_layer, again)
                if size >= 4 and size % 2 == 0:
                    yield Placement(size // 2, 2, by_layer, again)


def candidate(
    placement: Placement, costs: RecordedCosts, machine: Machine, peaks: MeasuredPeaks | None = None
) -> Candidate:
    """Return what a placement takes. `costs` are those of one process with the same setting for recomputation."""
    ways = {"replicas": placement.replicas, "shards": placement.shards, "by_layer": placement.by_layer}
    memory = memory_of(costs, **ways, peaks=peaks) if costs.rounds is not None else None  # type: ignore[arg-type]
    seconds = seconds_of(costs, machine, **ways)  # type: ignore[arg-type]
    return Candidate(placement, memory, seconds, costs.samples)


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
