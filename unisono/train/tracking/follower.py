"""The process that sends a run's timeline to its trackers.

    python -m unisono.train.tracking.follower RUN TIMELINE TRACKER[,TRACKER] RESULT_TIME

A training process starts it, so that importing a tracker's library, and a call of it that is slow or fails, cost no
time of training. It reads the timeline of that process from its beginning, and ends when its standard input ends: with
the training process, whatever ended it. What it prints, the training process shows.

RESULT_TIME is that of an earlier `result.json` when the training process began, from `modified`. A short run may have
its own result before this process has started.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import sys
import tomllib
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from unisono.config.toml_file import flat_items
from unisono.json_forms import parse
from unisono.monitor.timeline import as_number
from unisono.monitor.valid_lines import valid_line
from unisono.security.file_modes import open_like_folder, write_text
from unisono.trackers.growing_file import GrowingFile, input_ended
from unisono.trackers.registry import build_tracker, names_of
from unisono.trackers.tracker import Media, TrackedRun, Tracker

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
        self._log_media: Callable[[int, float, Media], None] = _no_media
        try:
            tracker = build_tracker(name)
            self._last = tracker.start(run)
            self._tracker = tracker
            self._log_media = getattr(tracker, "log_media", _no_media)
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

    def log_media(self, step: int, time: float, media: Media) -> None:
        """Record media, unless the tracker has its step already."""
        if step > self._last:
            self.log_last_media(step, time, media)

    def log_last_media(self, step: int, time: float, media: Media) -> None:
        """Record media that were logged after all steps."""
        try:
            if self._tracker is not None:
                self._log_media(step, time, media)
        except Exception as error:
            self._fail(f"failed at the {media.kind} {media.name} of step {step}", error)

    def flush(self) -> None:
        """Let others read what is recorded."""
        try:
            if self._tracker is not None:
                self._tracker.flush()
        except Exception as error:
            self._fail(f"failed after step {self._last}", error)

    def finish(self, result: Mapping[str, Any]) -> bool:
        """End. Return whether the tracker has recorded everything."""
        try:
            if self._tracker is not None:
                self._tracker.finish(result)
        except Exception as error:
            self._fail("failed at the end", error)
        return self._tracker is not None

    def _fail(self, what: str, error: Exception) -> None:
        self._tracker = None
        reason = _first_line(error)
        reason += "" if reason.endswith((".", "?")) else "."
        print(
            f"The tracker {self.name} {what}: {type(error).__name__}: {reason} Training continues without it.",
            flush=True,
        )


def _first_line(error: object) -> str:
    return str(error).strip().partition("\n")[0]


def _no_media(step: int, time: float, media: Media) -> None:
    """Record nothing, for a tracker that knows only numbers."""


class Unsent:
    """The media of steps whose line the timeline does not have yet: by kind and name, since a later one replaces them.

    Args:
        run_dir: The run directory, which has their files.
    """

    def __init__(self, run_dir: Path) -> None:
        self._dir = run_dir
        self._media: dict[tuple[int, str, str], Media] = {}

    def add(self, entry: Mapping[str, Any]) -> None:
        """Add what an event of the timeline names."""
        kind, name, step = str(entry["media"]), str(entry["name"]), int(entry["step"])
        file = self._dir / entry.get("file", "")
        self._media[step, kind, name] = Media(kind, name, file, entry.get("counts", ()), entry.get("edges", ()))

    def up_to(self, step: int) -> Iterator[tuple[int, Media]]:
        """Yield and remove the media of this step and of earlier ones, each with its step, in the order of steps."""
        for key in sorted(key for key in self._media if key[0] <= step):
            media = self._media.pop(key)
            if media.kind == "histogram" or media.file.is_file():
                yield key[0], media

    def rest(self) -> Iterator[Media]:
        """Yield and remove everything."""
        for _, media in self.up_to(sys.maxsize):
            yield media

    def drop(self, step: int) -> None:
        """Remove what this step and later ones have logged, because they are computed again."""
        self._media = {key: media for key, media in self._media.items() if key[0] < step}


class Feed:
    """Sends the lines of a timeline to trackers.

    Args:
        trackers: The trackers.
        unsent: The media whose steps are not finished.
        finished: By tracker: the last step of the run that it has finished. Changes at the end.
    """

    def __init__(self, trackers: Sequence[SafeTracker], unsent: Unsent, finished: dict[str, int]) -> None:
        self.trackers, self._unsent, self._finished = trackers, unsent, finished
        self._last = (-1, 0.0)  # step and time of the last line

    def line(self, line: bytes) -> None:
        """Send a line. Lines that a crash has cut off, and events that no tracker records, are left out."""
        entry = valid_line(line) or {}
        if "media" in entry:
            self._unsent.add(entry)
        elif "resumed_at" in entry:
            self._unsent.drop(int(entry["resumed_at"]))
        elif "step" in entry and "seconds" in entry:
            step, time = self._last = int(entry["step"]), float(entry["t"])
            for of_step, media in self._unsent.up_to(step):
                for tracker in self.trackers:
                    tracker.log_media(of_step, time, media)
            for tracker in self.trackers:
                tracker.log(step, time, numbers_in(entry))

    def flush(self) -> None:
        """Let others read what is recorded."""
        for tracker in self.trackers:
            tracker.flush()

    def finish(self, result: Mapping[str, Any]) -> None:
        """End. What was logged after the last step counts to this step; {}: the run was killed, and will repeat it."""
        step, time = self._last
        rest = list(self._unsent.rest()) if result else []
        for tracker in self.trackers:
            for media in rest if self._finished.get(tracker.name) != step else ():
                tracker.log_last_media(step, time, media)
            if tracker.finish(result) and result:
                self._finished[tracker.name] = step


def numbers_in(entry: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a step's line, by name: those of the loop have precedence."""
    known = {name: entry[name] for name in ("loss", "lr", "grad_norm") if name in entry}
    found = {name: as_number(value) for name, value in {**known, **entry.get("log", {})}.items()}
    return {name: number for name, number in found.items() if number is not None}


class TrackingFile:
    """`tracking.json` of a run: its id, and for each tracker the last step of the run that it has finished.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            known = json.loads(path.read_text())
            self.id, self.finished = str(known["id"]), {**known.get("finished", {})}
        except (OSError, ValueError, KeyError, TypeError):
            self.id, self.finished = uuid.uuid4().hex, {}
            self.write()

    def write(self) -> None:
        """Write the file."""
        part = self._path.with_suffix(".part")
        write_text(part, json.dumps({"id": self.id, "finished": self.finished}) + "\n")
        part.replace(self._path)


def describe_run(run_dir: Path, run_id: str) -> TrackedRun:
    """Return what trackers need to know of a run. A file that is damaged counts as absent."""
    try:
        settings = tomllib.loads(_text(run_dir / "settings.toml"))
    except ValueError:
        settings = {}
    return TrackedRun(run_dir, run_dir.name, run_id, dict(flat_items(settings)), _json(run_dir / "environment.json"))


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _json(path: Path) -> Mapping[str, Any]:
    """Return the object in a file; {}: there is none, or the file is damaged."""
    return (parse(path.read_bytes()) if path.exists() else None) or {}


def follow(path: Path, feed: Feed) -> None:
    """Send the lines of a timeline, until standard input has ended and the file has no more."""
    file, over = GrowingFile(path), False
    while True:
        while lines := file.lines():
            for line in lines:
                feed.line(line)
            feed.flush()
        if over:
            return
        over = input_ended(POLL_SECONDS)


def main() -> None:
    """Follow a run, as the module's docstring says."""
    run_dir, timeline, track, began = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    os.nice(10)  # training has precedence
    warnings.showwarning = _show_warning
    logging.raiseExceptions = False  # a library's own log file on a full disk, for which logging prints a traceback
    try:
        with open(run_dir / "tracking.lock", "w", opener=open_like_folder) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until the follower of a process that died has finished
            _follow_run(run_dir, timeline, track, began)
    except OSError as error:
        print(f"Trackers end here: {error}. Training continues without them.", flush=True)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning of a tracker's library in one line."""
    print(f"warning of a tracker: {_first_line(message)}", flush=True)


def _follow_run(run_dir: Path, timeline: Path, track: str, began: int) -> None:
    result, known = run_dir / "result.json", TrackingFile(run_dir / "tracking.json")
    run = describe_run(run_dir, known.id)
    feed = Feed([SafeTracker(name, run) for name in names_of(track)], Unsent(run_dir), known.finished)
    follow(timeline, feed)
    feed.finish(_json(result) if modified(result) != began else {})
    with contextlib.suppress(OSError):  # a full disk, which a tracker has reported
        known.write()


def modified(path: Path) -> int:
    """Return when a file was modified, in nanoseconds; 0 if there is none."""
    return path.stat().st_mtime_ns if path.exists() else 0


if __name__ == "__main__":
    main()
