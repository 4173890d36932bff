"""The protocol of a tracker, which records what a run logs.

A process of its own (unisono/train/tracking/follower.py) reads the run's timeline and calls the tracker, in this order:

    start(run)                  begin, or continue after a resume; returns the last step that is recorded already
    log_media(step, time, m)    for each image, text, histogram or table of a step, before its numbers
    log(step, time, numbers)    once for each line of the timeline, in the order of steps
    flush()                     about once a second, if something was logged
    finish(result)              the run has ended; media that were logged after the last step come just before

Only steps after the one that `start` returned are passed. So a tracker that returns what it really holds has every step
once, whatever was killed and resumed. A recomputed step has the same numbers, since the run has the same bits. Numbers
and media of a step are recorded together, or media can be recorded twice without harm: then media, too, are there once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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


class Media(NamedTuple):
    """Something that a run logged and that is no number.

    Attributes:
        kind: "image" (a PNG file), "text", "table" or "histogram".
        name: The name that the script gave it.
        file: Its file; of a histogram there is none.
        counts: Of a histogram: the number of values in each bin.
        edges: Of a histogram: the edges of the bins, one more than bins.
    """

    kind: str
    name: str
    file: Path = Path()
    counts: Sequence[int] = ()
    edges: Sequence[float] = ()

    def text(self) -> str:
        """Return a text."""
        return self.file.read_text(encoding="utf-8")

    def table(self) -> tuple[list[str], list[list[Any]]]:
        """Return the columns and the rows of a table."""
        content = json.loads(self.text())
        return content["columns"], content["data"]


class Tracker(Protocol):
    """Record what a run logs."""

    def start(self, run: TrackedRun) -> int:
        """Begin, or continue after a resume. Return the last step that is recorded already; -1: none."""
        ...

    def log(self, step: int, time: float, numbers: Mapping[str, float]) -> None:
        """Record numbers by name ("loss", names of `run.log`). `time`: the end of the step, seconds since 1970."""
        ...

    def log_media(self, step: int, time: float, media: Media) -> None:
        """Record an image, a text, a histogram or a table. A tracker without this method records none."""
        ...

    def flush(self) -> None:
        """Write what is in memory, so that others can read it."""
        ...

    def finish(self, result: Mapping[str, Any]) -> None:
        """End: the run has ended. `result`: the content of result.json; {}: the run was killed."""
        ...
