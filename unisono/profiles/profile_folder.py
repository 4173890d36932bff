"""The files of a profile, in `RUN/profile/`.

    rank-0.json.gz          what rank 0 recorded, in the trace event format (Chrome's), on its own clock
    trace.json.gz           all ranks on one clock
    hosts.json              the steps, the host of each rank, and the difference of the hosts' clocks
    memory-rank-0.pickle    with profile.memory, the allocations on an accelerator

A file has its name only when it is complete; before that, its name ends in `.part`. The first key of a trace is
"unisono", with facts about the recording, so that they can be read without the events.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.security.file_modes import make_folder, open_like_folder, write_text

COMPRESSION = 4
"""Level of gzip: twice as fast as the default, and files are 10 % larger."""

KEY = "unisono"
"""The key of the facts about a recording, the first one of a trace."""

HEAD_BYTES = 1 << 16
"""Largest size of the facts."""


class DamagedTraceError(Exception):
    """A trace cannot be read. The message is the reason."""


class ProfileFolder:
    """The files of the profile of a run.

    Args:
        run_dir: The run directory.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "profile"
        self.trace = self.path / "trace.json.gz"
        self.hosts = self.path / "hosts.json"
        self.lock = self.path / ".lock"

    def rank(self, rank: int) -> Path:
        """Return the trace of a rank."""
        return self.path / f"rank-{rank}.json.gz"

    def memory(self, rank: int) -> Path:
        """Return the snapshot of a rank's memory."""
        return self.path / f"memory-rank-{rank}.pickle"

    def ranks(self) -> dict[int, Path]:
        """Return the traces of all ranks that have one."""
        return self._numbered(r"rank-(\d+)\.json\.gz")

    def unfinished(self) -> dict[int, Path]:
        """Return the traces that are being written, or whose process was killed while it wrote them."""
        return self._numbered(r"rank-(\d+)\.json\.gz\.part")

    def _numbered(self, pattern: str) -> dict[int, Path]:
        names = {path: re.fullmatch(pattern, path.name) for path in self.path.glob("*")}
        return dict(sorted((int(found[1]), path) for path, found in names.items() if found is not None))

    def clear(self) -> None:
        """Create the folder, and remove an earlier profile from it."""
        make_folder(self.path)
        for pattern in ("*.json.gz", "*.pickle", "*.part", "hosts.json"):
            for path in self.path.glob(pattern):
                path.unlink(missing_ok=True)

    def host_facts(self) -> dict[str, Any]:
        """Return the content of hosts.json; {} if it cannot be read."""
        try:
            found = json.loads(self.hosts.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def write_hosts(self, facts: Mapping[str, Any]) -> None:
        """Write hosts.json."""
        write_text(part(self.hosts), json.dumps(facts, indent=1) + "\n")
        part(self.hosts).replace(self.hosts)


def part(path: Path) -> Path:
    """Return the name of a file while it is written."""
    return path.with_name(f"{path.name}.part")


def write_trace(path: Path, trace: Mapping[str, Any]) -> None:
    """Write a trace, whose first key is KEY."""
    assert next(iter(trace)) == KEY
    text = json.dumps(trace, separators=(",", ":"))
    with (
        open(part(path), "wb", opener=open_like_folder) as raw,
        gzip.open(raw, "wb", compresslevel=COMPRESSION) as file,
    ):
        file.write(text.encode())
    part(path).replace(path)


def read_trace(path: Path) -> dict[str, Any]:
    """Return a trace.

    Raises:
        DamagedTraceError: It is not complete, or no trace of ours.
    """
    try:
        with gzip.open(path, "rb") as file:
            trace = json.loads(file.read())
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise DamagedTraceError(_reason(error)) from error
    if not isinstance(trace, dict) or not {KEY, "traceEvents", "baseTimeNanoseconds"} <= trace.keys():
        raise DamagedTraceError("it is no trace that Unisono has written")
    return trace


def check_trace(path: Path) -> dict[str, Any]:
    """Return the facts about the recording of a trace, and check that the file is whole, without reading its events.

    Raises:
        DamagedTraceError: It is not whole, or no trace of ours.
    """
    try:
        with gzip.open(path, "rb") as file:
            head = file.read(HEAD_BYTES).decode(errors="replace")
            while file.read(1 << 20):  # a checksum is at the end
                pass
        before, _, rest = head.partition(f'"{KEY}":')
        facts, _ = json.JSONDecoder().raw_decode(rest)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise DamagedTraceError(_reason(error)) from error
    if before.strip() != "{" or not isinstance(facts, dict):
        raise DamagedTraceError("it is no trace that Unisono has written")
    return facts


def _reason(error: Exception) -> str:
    if isinstance(error, EOFError):
        return "it ends in the middle"
    return str(getattr(error, "strerror", None) or error).partition("\n")[0]
