"""The protocol of a tracker, which records what a run logs.

A process of its own (follower.py) reads the run's timeline and calls the tracker, in this order:

    start(run)                  begin, or continue after a resume; returns the last step that is recorded already
    log(step, time, numbers)    once for each line of the timeline, in the order of steps
    flush()                     about once a second, if something was logged
    finish(result)              the run has ended

Only steps after the one that `start` returned are passed to `log`. So a tracker that returns what it really holds has
every step once, whatever was killed and resumed. A recomputed step has the same numbers, since the run has the same
bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol


class TrackedRun(NamedTuple):
    """The run that a tracker records.

    Attributes:
        dir: The run directory.
        name: The name of the run: that of its directory.
        id: A name that no other run has, and that stays the same after a resume.
        settings: The settings by name ("parallel.shard"), as plain values.
        environment: The content of environment.json.
    """

    dir: Path
    name: str
    id: str
    settings: Mapping[str, Any]
    environment: Mapping[str, Any]


class Tracker(Protocol):
    """Record the numbers of a run."""

    def start(self, run: TrackedRun) -> int:
        """Begin, or continue after a resume. Return the last step that is recorded already; -1: none."""
        ...

    def log(self, step: int, time: float, numbers: Mapping[str, float]) -> None:
        """Record numbers by name ("loss", names of `run.log`). `time`: the end of the step, seconds since 1970."""
        ...

    def flush(self) -> None:
        """Write what is in memory, so that others can read it."""
        ...

    def finish(self, result: Mapping[str, Any]) -> None:
        """End: the run has ended. `result`: the content of result.json; {}: the run was killed."""
        ...
