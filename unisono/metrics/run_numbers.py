"""The numbers of a run, added up from the timelines of all ranks.

`RunNumbers.add` takes the lines in the order of a file, and files in any order. Sums include steps that were computed
twice, because the time was spent twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from unisono.machine.sample_file import read_samples
from unisono.monitor.timeline import as_number
from unisono.monitor.valid_lines import valid_line
from unisono.trackers.growing_file import GrowingFile

RECENT_SECONDS = 30.0
"""The time of training that the speed covers."""

SAME_DEATH_SECONDS = 120.0
"""The processes that remain report a death within this time."""


LAST_BYTES = 1 << 14
"""Bytes at the end of the samples of a host."""


class RankProcess(NamedTuple):
    """The process of a rank: the host and the process id, and when it began its loop."""

    host: str
    pid: int
    began: float


class Speed:
    """Samples per second of the last lines."""

    def __init__(self) -> None:
        self._lines = deque[tuple[float, float]]()
        self._samples = self._seconds = 0.0

    def add(self, samples: float, seconds: float) -> None:
        """Add a line: samples, and seconds that they took."""
        self._lines.append((samples, seconds))
        self._samples += samples
        self._seconds += seconds
        while len(self._lines) > 1 and self._seconds - self._lines[0][1] >= RECENT_SECONDS:
            old = self._lines.popleft()
            self._samples -= old[0]
            self._seconds -= old[1]

    @property
    def per_second(self) -> float | None:
        """The speed; None before the first line."""
        return self._samples / self._seconds if self._seconds > 0 else None


class RunNumbers:
    """The numbers.

    Attributes:
        run: By name, those of the whole run: step, time, loss, lr, grad_norm, checkpoint, samples, deaths.
        logged: The last values of `run.log` that are numbers.
        phases: Seconds by rank and phase.
        waits: Seconds in which a rank waited for messages of others.
        processes: The process of each rank that is in the run.
        sampled: Resident memory of ranks in the last samples of their hosts.
        promise: The promise since it was lowered; "": it was not.
        speed: Samples per second.
    """

    def __init__(self) -> None:
        self.run: dict[str, float] = {"deaths": 0, "samples": 0}
        self.logged: dict[str, float] = {}
        self.phases: dict[tuple[int, str], float] = {}
        self.waits: dict[int, float] = {}
        self.processes: dict[int, RankProcess] = {}
        self.sampled: dict[int, float] = {}
        self.promise = ""
        self.speed = Speed()
        self._dead: dict[tuple[int, int], float] = {}  # when a death was reported, by step and rank

    def add(self, rank: int, entry: Mapping[str, Any]) -> None:
        """Add a line of a rank's timeline, as `valid_line` returns it."""
        if "seconds" in entry:
            self._add_step(rank, entry)
        elif entry.get("event") == "start" and "host" in entry and "pid" in entry:
            self.processes[rank] = RankProcess(entry["host"], entry["pid"], float(entry["t"]))
        elif entry.get("event") == "death":
            self._add_deaths(entry["step"], entry["ranks"], float(entry["t"]))
        elif "checkpoint" in entry:
            self.run["checkpoint"] = float(entry["checkpoint"])
        elif "promise" in entry:
            self.promise = str(entry["promise"])

    def _add_step(self, rank: int, entry: Mapping[str, Any]) -> None:
        for phase, seconds in entry["seconds"].items():
            self.phases[rank, phase] = self.phases.get((rank, phase), 0.0) + seconds
        self.waits[rank] = self.waits.get(rank, 0.0) + entry.get("wait", 0.0)
        samples = entry.get("samples")
        if samples is None:
            return  # the other lines are those of the main process
        self.run |= {"step": float(entry["step"] + 1), "time": float(entry["t"])}
        self.run["samples"] += samples
        self.speed.add(samples, sum(entry["seconds"].values()))
        for name in ("loss", "lr", "grad_norm"):
            if (value := as_number(entry.get(name))) is not None:
                self.run[name] = value
        for name, logged in entry.get("log", {}).items():
            if (value := as_number(logged)) is not None:
                self.logged[name] = value

    def _add_deaths(self, step: int, ranks: list[int], time: float) -> None:
        """Count deaths once, although each process that remains reports them."""
        for rank in ranks:
            before = self._dead.get((step, rank))
            if before is None or abs(time - before) > SAME_DEATH_SECONDS:
                self._dead[step, rank] = time
                self.run["deaths"] += 1
                self.processes.pop(rank, None)


class TimelineFolder:
    """The timelines of a run, of which each line is read once.

    Args:
        folder: RUN/timeline.
        numbers: Gets the lines.
    """

    def __init__(self, folder: Path, numbers: RunNumbers) -> None:
        self._folder, self._numbers = folder, numbers
        self._files: dict[int, GrowingFile] = {}

    def read(self) -> None:
        """Read what was written since the last call, and the last samples of hosts."""
        for path in self._folder.glob("rank-*.jsonl"):
            rank = path.stem.removeprefix("rank-")
            if rank.isdecimal() and int(rank) not in self._files:
                self._files[int(rank)] = GrowingFile(path)
        for number_, file in sorted(self._files.items()):
            while lines := file.lines():
                for line in lines:
                    if (entry := valid_line(line)) is not None:
                        self._numbers.add(number_, entry)
        for path in self._folder.glob("host-*.jsonl"):
            for sample in read_samples(path, last_bytes=LAST_BYTES):
                for name, process in sample.get("processes", {}).items():
                    if "resident" in process:
                        self._numbers.sampled[int(name)] = process["resident"]
