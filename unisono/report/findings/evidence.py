"""What the files of a run say about its speed, in the form in which rules read it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from unisono.phases import PHASES
from unisono.plan.batch_order import cut_batch
from unisono.report.rank_series import RankColumns, present
from unisono.report.run_files import RunFiles

WARM_UP = 3
"""Lines at the beginning that are left out: the first steps load libraries and allocate memory."""

LEAST_SECONDS = 2.0
"""Shortest time that an advice saves. Shares in a short run are mostly noise."""

LEAST_GAIN = 0.1
"""Smallest share of the time that an advice saves."""


class Finding(NamedTuple):
    """A cause that costs time, or that will end the run.

    Attributes:
        kind: The name of the cause ("data", "straggler", ...).
        fact: A sentence that states it.
        evidence: Sentences with the numbers behind it.
        advice: What to type, or to do.
        gain: The share of the time that the advice is expected to save, 0 to 1; None: unknown.
        changes_result: Whether the advice changes what the model learns (another batch, a compressed gradient).
    """

    kind: str
    fact: str
    evidence: Sequence[str]
    advice: str
    gain: float | None
    changes_result: bool = False


class RankTime(NamedTuple):
    """The mean seconds of a step on a rank: by phase, and of them waiting for messages, running, collecting garbage."""

    rank: int
    phases: Mapping[str, float]
    wait: float
    cpu: float
    gc: float
    steps: int

    @property
    def total(self) -> float:
        """The mean seconds of a step."""
        return sum(self.phases.values())

    @property
    def compute(self) -> float:
        """Seconds of forward and backward passes."""
        return self.phases["forward"] + self.phases["backward"]

    @property
    def loop(self) -> float:
        """Seconds of a step without checkpoints and evaluations."""
        return self.total - self.phases["checkpoint"] - self.phases["evaluate"]


class Evidence:
    """The evidence of a run: of its steps since each process has started, so since the newest resume.

    Args:
        files: The files of the run, which were read.
    """

    def __init__(self, files: RunFiles) -> None:
        self.files = files
        self.settings = {name: setting.value for name, setting in files.settings.items()}
        self.columns = {
            rank: since(series.columns(), int(self.starts[rank].get("step", 0)))
            for rank, series in files.ranks.items()
            if rank in present(files.ranks)
        }
        servers = files.result.get("servers", 0)  # the first ranks, which spend their time in waiting for the workers
        self.ranks = {rank: _rank_time(each) for rank, each in self.columns.items() if rank >= servers}

    def number(self, name: str, otherwise: float = 0) -> float:
        """Return a setting that is a number."""
        try:
            return float(self.settings[name])
        except (KeyError, ValueError):
            return otherwise

    def middle(self, phase: str) -> float:
        """Return the median over ranks of the mean seconds of a step in a phase."""
        return median(each.phases[phase] for each in self.ranks.values())

    @cached_property
    def step(self) -> float:
        """The mean seconds of a step: the median over ranks."""
        return median(each.total for each in self.ranks.values())

    @cached_property
    def loop(self) -> float:
        """The same without checkpoints and evaluations."""
        return median(each.loop for each in self.ranks.values())

    @cached_property
    def steps(self) -> int:
        """The number of steps that the means are of."""
        return max(each.steps for each in self.ranks.values())

    @cached_property
    def starts(self) -> dict[int, Mapping[str, Any]]:
        """The newest event "start" of each rank that is part of the run."""
        return {rank: self.files.ranks[rank].start for rank in present(self.files.ranks)}

    @cached_property
    def spans(self) -> dict[int, tuple[int, int]]:
        """The virtual ranks [low, high) that each rank computes now."""
        return {rank: spans[-1][1] for rank in self.ranks if (spans := self._assigned(rank))}

    @cached_property
    def of_sample(self) -> dict[int, float]:
        """The mean seconds of forward and backward that a rank needs for a sample, without waiting in them.

        Ranks that have computed none are absent. If the size of a batch is unknown, it is that of a virtual rank.
        """
        found = {}
        passes = [PHASES.index("forward"), PHASES.index("backward")]
        for rank in self.ranks:
            columns, skipped = self.columns[rank], self.warm_up(rank)
            assigned = [(step, self.load(span)) for step, span in self._assigned(rank)] or [(0, 1)]
            place = np.searchsorted([step for step, _ in assigned], columns.last, side="right").clip(1) - 1
            work = np.array([load for _, load in assigned])[place] * columns.steps
            waited = np.maximum(columns.wait - columns.seconds[:, PHASES.index("exchange")], 0.0)
            spent = np.maximum(columns.seconds[:, passes].sum(1) - waited, 0.0)
            busy = np.flatnonzero(work > 0)
            busy = busy[busy >= skipped] if (busy >= skipped).any() else busy
            if len(busy):
                found[rank] = float(spent[busy].sum() / work[busy].sum())
        return found

    def load(self, span: tuple[int, int]) -> int:
        """Return the samples of the virtual ranks [low, high) in a batch; their number if the batch is unknown."""
        batch, virtual = int(self.number("batch")), int(self.number("virtual_ranks"))
        if not batch or not virtual:
            return span[1] - span[0]
        return (
            cut_batch(batch, virtual, span[1] - 1)[1] - cut_batch(batch, virtual, span[0])[0]
            if span[1] > span[0]
            else 0
        )

    def _assigned(self, rank: int) -> list[tuple[int, tuple[int, int]]]:
        """Return (step, span): from this step on, the rank computes these virtual ranks."""
        events = [event for event in self.files.ranks[rank].events if event.get("event") == "assignment"]
        return [(int(e["step"]), (int(e["virtual_ranks"][0]), int(e["virtual_ranks"][1]))) for e in events]

    @cached_property
    def hosts(self) -> dict[str, tuple[Mapping[str, Any], list[Mapping[str, Any]]]]:
        """The facts and the samples of each host."""
        found: dict[str, tuple[Mapping[str, Any], list[Mapping[str, Any]]]] = {}
        began = min((start.get("t", 0.0) for start in self.starts.values()), default=0.0)
        for host, lines in self.files.hosts.items():
            facts = [line["start"] for line in lines if isinstance(line.get("start"), dict)]
            found[host] = (
                facts[-1] if facts else {},
                [line for line in lines if "start" not in line and began <= line["t"]],
            )
        return found

    @cached_property
    def samples_per_epoch(self) -> int:
        """The number of samples in an epoch; 0 if it is unknown."""
        return max((int(start.get("samples_per_epoch") or 0) for start in self.starts.values()), default=0)

    def warm_up(self, rank: int) -> int:
        """Return how many lines at the beginning of a rank's timeline are left out."""
        return _warm_up(self.columns[rank])

    def assigned_at(self, rank: int) -> int:
        """Return the step since which a rank computes its present virtual ranks."""
        assigned = self._assigned(rank)
        return assigned[-1][0] if assigned else 0

    @property
    def on_cpu(self) -> bool:
        """Whether all ranks compute on the CPU."""
        return all(str(start.get("device", "cpu")).startswith("cpu") for start in self.starts.values())

    def cores_of(self, rank: int) -> float:
        """Return the cores that the processes of a rank's host can use together."""
        facts, samples = self.hosts.get(str(self.starts.get(rank, {}).get("host", "")), ({}, []))
        bound = {core for sample in samples[-1:] for core in _allowed(sample)}
        return float(len(bound) or facts.get("cores") or self.files.environment.get("cores") or 1)

    def ranks_beside(self, rank: int) -> int:
        """Return the number of ranks on the host of a rank."""
        host = self.starts.get(rank, {}).get("host")
        return sum(start.get("host") == host for start in self.starts.values()) or 1

    def delayed(self, rank: int) -> float:
        """Return the share of the time in which the main thread of a rank waited for a core; 0 if it is unknown."""
        _, samples = self.hosts.get(str(self.starts.get(rank, {}).get("host", "")), ({}, []))
        return mean_of(samples, "processes", str(rank), "delayed") or 0.0

    def worth(self, gain: float) -> bool:
        """Return whether saving this share of the time is worth a word."""
        return gain >= LEAST_GAIN and gain * self.step * self.steps >= LEAST_SECONDS


def since(columns: RankColumns, step: int) -> RankColumns:
    """Return the rows that begin at or after a step; all of them if none does."""
    rows = columns.first >= step
    if rows.all() or not rows.any():
        return columns
    values = {name: column[rows] for name, column in columns.values.items()}
    found = columns._asdict()
    arrays = {name: array[rows] for name, array in found.items() if isinstance(array, np.ndarray)}
    return RankColumns(**{**found, **arrays, "values": values})


def mean_of(samples: Sequence[Mapping[str, Any]], *path: str) -> float | None:
    """Return the mean of a value in samples of a host; None if no sample has it."""
    values = list(values_of(samples, *path))
    return sum(values) / len(values) if values else None


def values_of(samples: Sequence[Mapping[str, Any]], *path: str) -> list[float]:
    """Return a value of each sample of a host that has it."""
    found = []
    for sample in samples:
        value: Any = sample
        for name in path:
            value = value.get(name) if isinstance(value, Mapping) else None
        if isinstance(value, (int, float)):
            found.append(float(value))
    return found


def _warm_up(columns: RankColumns) -> int:
    return WARM_UP if len(columns.last) > 2 * WARM_UP else 0


def _allowed(sample: Mapping[str, Any]) -> Iterator[int]:
    """Yield the cores to which processes are bound, from texts like "0-3,8"."""
    for process in (sample.get("processes") or {}).values():
        for part in filter(None, str(process.get("allowed", "")).split(",")):
            first, _, last = part.partition("-")
            yield from range(int(first), int(last or first) + 1)


def _rank_time(columns: RankColumns) -> RankTime:
    skipped = _warm_up(columns)
    steps = float(np.sum(columns.steps[skipped:]))
    spent = columns.seconds[skipped:].sum(0) / steps
    return RankTime(
        columns.rank,
        {phase: float(seconds) for phase, seconds in zip(PHASES, spent, strict=True)},
        float(columns.wait[skipped:].sum() / steps),
        float(columns.cpu[skipped:].sum() / steps),
        float(columns.gc[skipped:].sum() / steps),
        int(steps),
    )


def percent(share: float) -> str:
    """Return a share as text."""
    return f"{share:.0%}"


def duration(seconds: float) -> str:
    """Return a duration of a step as text."""
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
