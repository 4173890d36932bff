"""Merge the traces of all ranks into one, on the clock of the first host.

`python -m unisono.profiles.merged_trace RUN` does so in a process of its own, while training continues.
"""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from unisono.profiles.profile_folder import (
    COMPRESSION,
    KEY,
    DamagedTraceError,
    ProfileFolder,
    check_trace,
    part,
    read_trace,
)
from unisono.profiles.rank_trace import ALLOCATION, Event
from unisono.security.file_modes import open_like_folder

FLOWS = ("s", "t", "f")
"""Kinds of events that are the ends of an arrow between spans."""


class MergedRanks(NamedTuple):
    """The ranks of a merged trace.

    Attributes:
        ranks: The ranks that are in it.
        damaged: The reason for each rank whose trace cannot be read.
    """

    ranks: list[int]
    damaged: dict[int, str]


def merge(folder: ProfileFolder) -> MergedRanks:
    """Merge the traces of all ranks, unless that is done already. Another process may do so at the same time.

    Raises:
        OSError: The trace cannot be written.
        DamagedTraceError: A trace has no valid events.
    """
    with _locked(folder):
        facts: dict[int, Mapping[str, Any]] = {}
        damaged: dict[int, str] = {}
        for rank, path in folder.ranks().items():
            try:
                facts[rank] = check_trace(path)
            except DamagedTraceError as error:
                damaged[rank] = str(error)
        if facts and not _is_new(folder, sorted(facts)):
            _write(folder, facts)
        return MergedRanks(list(facts), damaged)


def _is_new(folder: ProfileFolder, ranks: list[int]) -> bool:
    """Return whether the merged trace has these ranks, and is newer than the files that it is made of."""
    try:
        made = folder.trace.stat().st_mtime_ns
        used = [*map(folder.rank, ranks), *([folder.hosts] if folder.hosts.exists() else [])]
        return check_trace(folder.trace).get("ranks") == ranks and all(p.stat().st_mtime_ns < made for p in used)
    except (OSError, DamagedTraceError):
        return False


def _write(folder: ProfileFolder, facts: Mapping[int, Mapping[str, Any]]) -> None:
    """Write the merged trace, one rank after the other."""
    hosts = folder.host_facts()
    offsets = {rank: clock_offset(hosts, str(each.get("host"))) for rank, each in facts.items()}
    start = min(int(each["began"]) - offsets[rank] for rank, each in facts.items())
    numbers: dict[Any, int] = {}  # of arrows, which are numbered by rank until here
    about = {"ranks": sorted(facts), "steps": next(iter(facts.values()))["steps"]}
    with (
        open(part(folder.trace), "wb", opener=open_like_folder) as raw,
        gzip.open(raw, "wt", compresslevel=COMPRESSION, encoding="utf-8") as file,
    ):
        file.write(f'{{"{KEY}":{json.dumps(about)},"displayTimeUnit":"ms","baseTimeNanoseconds":{start},')
        file.write('"traceEvents":[')
        for place, rank in enumerate(sorted(facts)):
            trace = read_trace(folder.rank(rank))
            shift = (int(trace["baseTimeNanoseconds"]) - offsets[rank] - start) / 1000
            moved = (_moved(each, shift, rank, numbers) for each in _shown(trace))
            file.write(",\n" * (place > 0) + ",\n".join(json.dumps(each, separators=(",", ":")) for each in moved))
        file.write("]}")
    part(folder.trace).replace(folder.trace)


def _shown(trace: Mapping[str, Any]) -> Iterator[Event]:
    """Yield the events of a rank, without the single allocations: a counter shows their sum."""
    return (each for each in trace["traceEvents"] if each.get("name") != ALLOCATION)


def _moved(event: Event, shift: float, rank: int, numbers: dict[Any, int]) -> Event:
    """Return an event of a rank on the common clock, with a number for its arrow that no other rank uses."""
    if event["ph"] == "M":
        return event
    moved = {**event, "ts": round(event["ts"] + shift, 3)}
    if "dur" in event:
        moved["dur"] = round(event["dur"], 3)
    if event["ph"] in FLOWS:
        moved["id"] = numbers.setdefault((rank, event.get("cat"), event.get("id")), len(numbers) + 1)
    return moved


def clock_offset(facts: Mapping[str, Any], host: str) -> int:
    """Return by how many nanoseconds the clock of a host is ahead of that of the first host.

    Args:
        facts: The content of hosts.json.
        host: The name of the host.
    """
    measured = facts.get("clocks", {}).get(host, {})
    return round(1000 * float(measured.get("offset_us", 0.0)))


@contextmanager
def _locked(folder: ProfileFolder) -> Iterator[None]:
    """Run a block that only one process runs at a time."""
    with open(folder.lock, "w", opener=open_like_folder) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> int:
    """Merge the traces of a run, as the module's docstring says."""
    os.nice(10)  # training has precedence
    try:
        found = merge(ProfileFolder(Path(sys.argv[1])))
    except (OSError, DamagedTraceError) as error:
        print(getattr(error, "strerror", None) or error)
        return 1
    for rank, reason in found.damaged.items():
        print(f"the trace of rank {rank} cannot be read: {reason}")
    return 0 if found.ranks else 1


if __name__ == "__main__":
    sys.exit(main())
