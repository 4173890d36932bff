"""A scaling curve: speed-up and efficiency by the number of processes, and the parts of a step that cost efficiency.

    strong    all numbers of processes compute the same batch
    weak      each process computes a batch of its own size: n processes have n times the batch and the virtual ranks

    efficiency(n)   the process time that the reference needs for the samples of a step, over that of n processes
    lost(n, part)   what n processes spend in a part of the step beyond the reference, over their whole process time

All parts together are 1 - efficiency. The reference is the smallest number of processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from unisono.costs.recorded_costs import WARM_UP

Kind = Literal["strong", "weak"]

PARTS: Mapping[str, str] = {
    "compute": "forward and backward passes",
    "uneven": "waiting for the process that computes longest",
    "data": "waiting for data",
    "exchange": "messages that no computation hides",
    "update": "the update",
    "other": "the rest of the step",
}
"""The parts of a step, with a description of each."""

SHOWN = 0.005
"""The least share of the process time that is shown as lost."""


@dataclass(frozen=True)
class ScalePoint:
    """A step on some processes.

    Attributes:
        processes: Their number.
        samples: The samples of a step.
        seconds: The time of a step.
        parts: The seconds of all processes together in each part. Their sum is `processes * seconds`.
    """

    processes: int
    samples: int
    seconds: float
    parts: Mapping[str, float]

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.samples / self.seconds

    @classmethod
    def of(cls, runs: Sequence[Sequence[Mapping[str, Any]]]) -> ScalePoint:
        """Return the medians over steps of several runs.

        Args:
            runs: For each run what its processes have recorded (train/costs/step_costs.py).
        """
        steps = [step for run in runs for step in zip(*(rank["steps"][WARM_UP:] for rank in run), strict=False)]
        count, seconds = len(runs[0]), median(max(rank["seconds"] for rank in step) for step in steps)
        divided = [_parts(step) for step in steps]
        parts = {name: median(each[name] for each in divided) for name in PARTS if name != "other"}
        parts["other"] = count * seconds - sum(parts.values())
        return cls(count, runs[0][0]["samples"], seconds, parts)


def _parts(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the seconds of all processes in each part of one step."""
    computed = [rank["data"] + rank["forward"] + rank["backward"] for rank in ranks]
    # a process that computes less waits for the others in the exchange
    uneven = sum(min(max(computed) - own, rank["exchange"]) for own, rank in zip(computed, ranks, strict=True))
    return {
        "compute": sum(rank["forward"] + rank["backward"] for rank in ranks),
        "uneven": uneven,
        "data": sum(rank["data"] for rank in ranks),
        "exchange": sum(rank["exchange"] for rank in ranks) - uneven,
        "update": sum(rank["update"] for rank in ranks),
    }


@dataclass(frozen=True)
class ScalingCurve:
    """The points of one kind of scaling.

    Attributes:
        kind: "strong" or "weak".
        points: The points, by the number of processes. The first one is the reference.
    """

    kind: Kind
    points: Sequence[ScalePoint]

    @property
    def reference(self) -> ScalePoint:
        return self.points[0]

    def speed_up(self, point: ScalePoint) -> float:
        """Return samples per second over those of the reference."""
        return point.rate / self.reference.rate

    def ideal(self, point: ScalePoint) -> float:
        """Return the speed-up if nothing were lost."""
        return point.processes / self.reference.processes

    def efficiency(self, point: ScalePoint) -> float:
        """Return the part of the process time that the reference would need for these samples."""
        return self.speed_up(point) / self.ideal(point)

    def lost(self, point: ScalePoint) -> dict[str, float]:
        """Return the share of the process time that each part costs beyond the reference, the largest first."""
        scale, total = point.samples / self.reference.samples, point.processes * point.seconds
        found = {name: (point.parts[name] - scale * self.reference.parts[name]) / total for name in PARTS}
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def main_loss(self, point: ScalePoint) -> str | None:
        """Return the part that costs most; None: nothing costs a share that is shown."""
        name, share = next(iter(self.lost(point).items()))
        return name if share >= SHOWN else None

    def as_json(self) -> list[dict[str, Any]]:
        """Return the points as JSON can hold them."""
        return [
            {
                "processes": point.processes,
                "samples": point.samples,
                "seconds": point.seconds,
                "samples_per_second": point.rate,
                "speed_up": self.speed_up(point),
                "efficiency": self.efficiency(point),
                "lost": self.lost(point),
            }
            for point in self.points
        ]
