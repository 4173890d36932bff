"""The record of joins, losses, refusals and stops of a run, in which each line holds the hash of the line before.

    {"n": 0, "t": 1790000000.1, "event": "begin", ..., "before": sha256 of nothing}
    {"n": 1, "t": 1790000000.2, "event": "join", ..., "before": sha256 of line 0}

A line that is removed, changed, moved or added does not fit the hash in the next line, or its own hash does not fit the
line before (Schneier and Kelsey 1999, "Secure audit logs to support computer forensics", without keys). Without a key,
a writer of the file can compute all hashes again. And a file whose last lines are cut off still fits: `result.json`
therefore states the number of lines, and the hash of the last one. Keep a copy of that hash where the writer of the
file cannot change it, to detect both.

One process writes it: the launcher.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from unisono.security.file_modes import open_like_folder, write_text

NAME = "audit.jsonl"
"""The file in the run directory."""

REASON = ".stop-reason"
"""The file in which the process that sends SIGTERM to a launcher leaves the reason."""

NOTHING = hashlib.sha256(b"").hexdigest()


class Record(Protocol):
    """Record an event of a run."""

    def __call__(self, event: str, **facts: Any) -> None: ...


def unrecorded(event: str, **facts: Any) -> None:
    """Record nothing: for runs without a run directory of their own."""


class AuditTrail:
    """The file of one run. It is a `Record`, which several threads can call.

    Args:
        path: The file. The chain of an earlier start is continued.
        say: Prints a line for the user if the file cannot be written; the run continues.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._path, self._say, self._lock = path, say, threading.Lock()
        self.lines, self.last = 0, NOTHING
        self._begins = b""
        with suppress(FileNotFoundError):
            content = path.read_bytes()
            self._begins = b"\n" if content and not content.endswith(b"\n") else b""  # a line was cut off by a crash
            lines = content.removesuffix(b"\n").split(b"\n") if content else []
            self.lines, self.last = len(lines), hash_of(lines[-1]) if lines else NOTHING

    def __call__(self, event: str, **facts: Any) -> None:
        """Append a line. It is on the disk when this returns."""
        with self._lock:
            about = {"n": self.lines, "t": round(time.time(), 3), "event": event, **facts, "before": self.last}
            line = json.dumps(about, default=str).encode()
            try:
                file = open_like_folder(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
                try:
                    os.write(file, self._begins + line + b"\n")
                    os.fsync(file)
                finally:
                    os.close(file)
            except OSError as error:
                self._say(f"Cannot write {self._path}: {error.strerror}. The event {event} is not recorded.")
                return
            self._begins, self.lines, self.last = b"", self.lines + 1, hash_of(line)

    @property
    def seal(self) -> dict[str, Any]:
        """The number of lines and the hash of the last one, for the result of the run."""
        return {"lines": self.lines, "sha256": self.last}


def hash_of(line: bytes) -> str:
    """Return the sha256 of a line without its end."""
    return hashlib.sha256(line).hexdigest()


class Flaw(NamedTuple):
    """A place in which the chain is broken: the number of the line, from 1, and what is wrong."""

    line: int
    what: str


class Trail(NamedTuple):
    """A record that was read: the entry of each line (None: it is none), and the flaws."""

    entries: list[dict[str, Any] | None]
    flaws: list[Flaw]


def read_trail(content: bytes, seal: Mapping[str, Any] | None = None) -> Trail:
    """Read a record, and check its chain.

    Args:
        content: The content of the file.
        seal: What `result.json` states about it.
    """
    lines = content.removesuffix(b"\n").split(b"\n") if content else []
    entries = [_entry(line) for line in lines]
    flaws: list[Flaw] = []
    before = NOTHING
    for place, (line, entry) in enumerate(zip(lines, entries, strict=True)):
        if entry is None:
            flaws.append(Flaw(place + 1, "is no entry: it was changed, or cut off by a crash"))
        elif entry.get("before") != before:
            what = "does not follow the line before: a line was changed, removed, moved or added here"
            first = "is not the first line of a record: lines before it are missing"
            flaws.append(Flaw(place + 1, what if place else first))
        elif entry.get("n") != place:
            flaws.append(Flaw(place + 1, f"says that it is line {entry.get('n')!r} + 1"))
        before = hash_of(line)
    return Trail(entries, flaws + _flaws_of_end(lines, seal))


def _flaws_of_end(lines: list[bytes], seal: Mapping[str, Any] | None) -> list[Flaw]:
    """Return what does not fit the seal in the result."""
    count = seal.get("lines") if seal is not None else None
    if seal is None or not isinstance(count, int) or count < 1:
        return []
    if len(lines) < count:
        return [Flaw(len(lines) + 1, f"is missing: result.json states {count} lines, and the file has {len(lines)}")]
    if hash_of(lines[count - 1]) != seal.get("sha256"):
        return [Flaw(count, "has another hash than the one in result.json: it was changed, or lines before it were")]
    return []


def _entry(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("event"), str) else None


def leave_reason(run_dir: Path, **facts: Any) -> None:
    """Leave the reason for a signal that this process is about to send to the launcher of a run."""
    write_text(run_dir / REASON, json.dumps({**facts, "host": socket.gethostname()}))


def take_reason(run_dir: Path) -> dict[str, Any]:
    """Return the reason that another process has left, and remove it; {} if there is none."""
    path = run_dir / REASON
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(path.read_bytes()[:4096])
        path.unlink()
        return {f"by_{name}": value for name, value in found.items()} if isinstance(found, dict) else {}
    return {}
