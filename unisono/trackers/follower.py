"""The process that sends a run's timeline to its trackers.

    python -m unisono.trackers.follower RUN TIMELINE TRACKER[,TRACKER]

A training process starts it, so that importing a tracker's library, and a call of it that is slow or fails, cost no
time of training. It reads the timeline of that process from its beginning, and ends when its standard input ends: with
the training process, whatever ended it. What it prints, the training process shows.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import tomllib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from unisono.trackers.growing_file import GrowingFile, input_ended
from unisono.trackers.registry import build_tracker, names_of
from unisono.trackers.tracker import TrackedRun, Tracker

POLL_SECONDS = 1.0
"""Time between two looks at the timeline."""


class SafeTracker:
    """A tracker whose errors are reported once, and end it.

    Args:
        name: Its name in the setting `track`.
        run: The run that it records.
    """

    def __init__(self, name: str, run: TrackedRun) -> None:
        self.name = name
        self._tracker: Tracker | None = None
        self._last = -1
        try:
            tracker = build_tracker(name)
            self._last = tracker.start(run)
            self._tracker = tracker
        except Exception as error:
            self._fail("could not start", error)

    def log(self, step: int, time: float, numbers: Mapping[str, float]) -> None:
        """Record a step, unless the tracker has it already."""
        if self._tracker is None or step <= self._last:
            return
        self._last = step
        try:
            self._tracker.log(step, time, numbers)
        except Exception as error:
            self._fail(f"failed at step {step}", error)

    def flush(self) -> None:
        """Let others read what is recorded."""
        try:
            if self._tracker is not None:
                self._tracker.flush()
        except Exception as error:
            self._fail(f"failed after step {self._last}", error)

    def finish(self, result: Mapping[str, Any]) -> None:
        """End."""
        try:
            if self._tracker is not None:
                self._tracker.finish(result)
        except Exception as error:
            self._fail("failed at the end", error)

    def _fail(self, what: str, error: Exception) -> None:
        self._tracker = None
        reason = str(error).strip().partition("\n")[0]
        print(
            f"The tracker {self.name} {what}: {type(error).__name__}: {reason}. Training continues without it.",
            flush=True,
        )


def steps_in(lines: Sequence[bytes]) -> Iterator[tuple[int, float, dict[str, float]]]:
    """Yield the step, the time and the numbers of those lines of a timeline that are steps."""
    for line in lines:
        try:
            entry = json.loads(line)
            step, time, _ = int(entry["step"]), float(entry["t"]), entry["us"]
        except (ValueError, KeyError, TypeError):
            continue  # an event, or a line that a crash has cut off
        numbers = {"loss": entry["loss"]} if "loss" in entry else {}
        found = {name: _number(value) for name, value in {**numbers, **entry.get("log", {})}.items()}
        yield step, time, {name: number for name, number in found.items() if number is not None}


def _number(value: Any) -> float | None:
    """Return a number of a timeline, in which NaN and infinity are strings; None if it is no number."""
    if value in ("nan", "inf", "-inf") or isinstance(value, (int, float)):
        return float(value)
    return None


def describe_run(run_dir: Path) -> TrackedRun:
    """Return what trackers need to know of a run. The id is made once, and kept in tracking.json."""
    known = run_dir / "tracking.json"
    try:
        run_id = str(json.loads(known.read_text())["id"])
    except (OSError, ValueError, KeyError):
        run_id = uuid.uuid4().hex
        part = known.with_suffix(".part")
        part.write_text(json.dumps({"id": run_id}) + "\n")
        part.replace(known)
    settings = tomllib.loads(_text(run_dir / "settings.toml"))
    environment = json.loads(_text(run_dir / "environment.json") or "{}")
    return TrackedRun(run_dir, run_dir.name, run_id, dict(_flat(settings)), environment)


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield before + name, value


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def follow(path: Path, trackers: Sequence[SafeTracker]) -> None:
    """Send the lines of a timeline to trackers, until standard input has ended and the file has no more."""
    file, over = GrowingFile(path), False
    while True:
        while lines := file.lines():
            for step, time, numbers in steps_in(lines):
                for tracker in trackers:
                    tracker.log(step, time, numbers)
            for tracker in trackers:
                tracker.flush()
        if over:
            return
        over = input_ended(POLL_SECONDS)


def main() -> None:
    """Follow a run, as the module's docstring says."""
    run_dir, timeline, track = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    os.nice(10)  # training has precedence
    with (run_dir / "tracking.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the follower of a process that died has finished
        began = _modified(run_dir / "result.json")
        run = describe_run(run_dir)
        trackers = [SafeTracker(name, run) for name in names_of(track)]
        follow(timeline, trackers)
        result = run_dir / "result.json"
        ended = _modified(result) != began
        for tracker in trackers:
            tracker.finish(json.loads(_text(result)) if ended else {})


def _modified(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


if __name__ == "__main__":
    main()
