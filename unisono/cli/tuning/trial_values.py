"""Read the values that the processes of a trial record (train/recording/value_recorder.py)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.monitor.timeline import as_number

MOST_REPORTS = 100
"""Intermediate values of a trial that pruners see. Of longer trials, they see the first one in each hundredth."""


class TrialValues:
    """The values of a trial, merged from the files of its processes.

    Args:
        folder: The folder of the files.

    Attributes:
        by_step: The values of each step, by name.
        begin: The line of the newest beginning of the run; {}: it has not begun.
        end: The line of its newest end; {}: it has not ended.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self.by_step: dict[int, dict[str, float]] = {}
        self.begin: Mapping[str, Any] = {}
        self.end: Mapping[str, Any] = {}
        self.process_seconds, self.timed_steps = 0.0, 0
        self.newest = 0.0

    def read(self) -> None:
        """Read what is new in the files."""
        for path in sorted(self._folder.glob("rank-*.jsonl")):
            at = self._read.get(path, 0)
            with path.open("rb") as file:
                file.seek(at)
                data = file.read()
            whole = data.rfind(b"\n") + 1
            self._read[path] = at + whole
            for line in data[:whole].splitlines():
                self._add(line, main=path.name == "rank-0.jsonl")

    def _add(self, line: bytes, *, main: bool) -> None:
        try:
            entry = json.loads(line)
        except ValueError:
            return  # empty, or cut off by a crash
        if "values" in entry:
            found = self.by_step.setdefault(int(entry["step"]), {})
            for name, value in entry["values"].items():
                if (number := as_number(value)) is not None:
                    found[name] = number
            self.newest = max(self.newest, float(entry["t"]))
        elif "begin" in entry:
            self.begin = max(self.begin, entry, key=_time)
        elif "end" in entry:
            self.end = max(self.end, entry, key=_time)
            if main:
                self.process_seconds += float(entry["process_seconds"])
                self.timed_steps += int(entry["steps"])

    @property
    def total(self) -> int:
        """The number of steps of the run; 0: not known yet."""
        return int(self.begin.get("total", 0))

    @property
    def names(self) -> list[str]:
        """The names of all values."""
        return sorted({name for values in self.by_step.values() for name in values})

    @property
    def is_complete(self) -> bool:
        """Whether the script has reached its end, and was not stopped by a signal."""
        return bool(self.end) and not self.end["left"] and _time(self.end) >= _time(self.begin)

    @property
    def steps(self) -> int:
        """The number of steps that were computed."""
        return min(max(self.by_step, default=-1) + 1, self.total) if self.total else 0

    def reports(self, name: str) -> list[tuple[int, float]]:
        """Return (step, value) of a metric as a pruner sees it, of finished steps without the last one of the run."""
        before = self.total - 1 if self.is_complete else min(max(self.by_step, default=0), self.total - 1)
        stride = -(-self.total // MOST_REPORTS) or 1
        found: dict[int, tuple[int, float]] = {}
        for step in sorted(self.by_step):
            if step < before and name in self.by_step[step]:
                found.setdefault(step // stride, (step, self.by_step[step][name]))
        return list(found.values())

    def last(self, name: str) -> float | None:
        """Return the last value of a metric, or a measured one; None: it was never logged."""
        if name == "parameters" and self.begin:
            return float(self.begin["parameters"])
        if name == "seconds" and self.timed_steps:
            return self.process_seconds / self.timed_steps
        if name == "memory" and self.end:
            return float(self.end["memory"])
        steps = [step for step, values in self.by_step.items() if name in values]
        return self.by_step[max(steps)][name] if steps else None

    def seconds_left(self) -> float | None:
        """Return an estimate of the time to the end of the run, from its newest beginning; None: too early."""
        done = self.steps - int(self.begin.get("begin", 0))
        if done < 2 or self.newest <= float(self.begin["t"]):
            return None
        return (self.total - self.steps) * (self.newest - float(self.begin["t"])) / done


def _time(entry: Mapping[str, Any]) -> float:
    return float(entry.get("t", 0.0))
