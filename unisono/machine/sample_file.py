"""The samples of a host, `timeline/host-NAME.jsonl`: a line of JSON about every two seconds.

A process that begins to sample writes a line of facts, and at the end of the run a line that says so. Other lines are
samples. Values that a machine does not have are absent. Shares are of 1, rates are means since the line before, all
sizes are bytes.

    {"t": 1760000000.1, "start": {"host": "a", "rank": 0, "every": 2.0, "cores": 4.0, ...}}
    {"t": 1760000002.1, "cpu": 0.53, "cores": {"runnable": 3, ...}, "memory": {"available": 8123456789}, ...}
    {"t": 1760000009.7, "end": {"rank": 0}}

    start      host       its name
               rank       the process that samples
               every      seconds between samples
               cores      cores that the process which samples can use: the smaller one of affinity and quota
               cpus       cores of the host; affinity: those that this process may use
               ranks      processes of the run on this host; threads: torch's threads in each
               memory     total, swap
               cgroup     limits of the control group: cpus (cores), memory
               run_disk   the device of the run directory
               devices    accelerators: index, uuid, name, memory, watts (limit), link (bytes a second to the host)
               not_measured  counters of energy that cannot be read, and why
    t          seconds since 1970
    cpu        share of the time in which the host's cores were busy
    cores      iowait, steal  shares of the time
               runnable   threads that run or wait for a core
               mhz        mean frequency of up to four cores
               celsius    temperature of the hottest package
               throttled  share of the time in which a package was slowed down because of heat
    memory     available, swap (in use), swap_in, swap_out (per second)
    pressure   cpu, memory, io: share of the time in which some task waited for it
    cgroup     throttled  seconds per second in which the quota held up threads, over all cores
               throttled_periods  share of the quota's periods in which that happened
               memory     in use, without files that can be dropped
               oom_kills  processes that were killed for memory since the line before
    disk       for each device: read, written (per second), busy (share of the time)
    network    for each interface: sent, received (per second)
    processes  for each rank of the run on this host:
               cpu        cores in use
               delayed    share of the time in which its main thread waited for a core
               resident, peak (of resident), swap, threads
               read, written, faults (major ones): per second
               allowed    the cores that it may use, such as 0-3,8, if not all
               workers    its children together: count, cpu, resident
    devices    for each accelerator: index, utilization (share of the time), memory, watts, celsius, mhz,
               from_host, to_host (bytes a second),
               throttled  reasons for a lower clock: power, power brake, slowdown, thermal
    energy     for each counter: joules since the run began, watts, counter (its reading in joules)

The file stays below 50 MB in a run of 14 days: as it grows, the interval between lines grows with it, from 2 s to about
a minute. Rates, peaks and energy are right at any interval, since the kernel counts them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from unisono.json_forms import Form, fits, is_number, is_object, is_text, list_of, object_of, parse
from unisono.security.file_modes import make_folder, open_like_folder

CORES = re.compile(r"(\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*)?")
"""Numbers of cores, such as 0-3,8."""

FACTS: Mapping[str, Form] = {
    "host": is_text,
    "cores": is_number,
    "memory": is_object,
    "cgroup": is_object,
    "devices": list_of(is_object),
}
PROCESS: Mapping[str, Form] = {
    **dict.fromkeys(("cpu", "delayed", "resident"), is_number),
    "allowed": lambda value: isinstance(value, str) and CORES.fullmatch(value) is not None,
    "workers": is_object,
}
SAMPLE: Mapping[str, Form] = {
    "t": is_number,
    "start": lambda value: isinstance(value, dict) and fits(value, FACTS),
    **dict.fromkeys(("cores", "memory", "pressure", "cgroup"), is_object),
    **dict.fromkeys(("disk", "network", "energy"), object_of(is_object)),
    "processes": lambda value: object_of(is_process)(value) and all(map(is_rank, value)),
    "devices": list_of(is_object),
}

MOST_BYTES = 45e6
"""Size of the file after `MOST_SECONDS`."""

MOST_SECONDS = 14 * 86_400.0


class SampleFile:
    """Append to the samples of a host.

    Raises:
        OSError: The file cannot be opened, or, by `write`, written.
    """

    def __init__(self, path: Path) -> None:
        make_folder(path.parent)
        self._file = open_like_folder(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
        self._size = os.fstat(self._file).st_size
        self._length = 0
        self._is_cut_off = self._size > 0 and os.pread(self._file, 1, self._size - 1) != b"\n"

    def write(self, entry: Mapping[str, Any]) -> None:
        """Append a line."""
        line = json.dumps(entry, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        data = b"\n" * self._is_cut_off + line
        self._is_cut_off = True
        while data:
            done = os.write(self._file, data)
            data, self._size = data[done:], self._size + done
        self._is_cut_off, self._length = False, len(line)

    def interval(self, every: float) -> float:
        """Return the seconds until the next line.

        An interval that is proportional to the size s makes the size grow with the root of time. This factor makes it
        MOST_BYTES after MOST_SECONDS: s ds/dt = MOST_BYTES**2 / (2 MOST_SECONDS).
        """
        return max(every, 2 * MOST_SECONDS * self._length * self._size / MOST_BYTES**2)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def samples_path(run_dir: Path, host: str) -> Path:
    """Return the file with the samples of a host."""
    name = "".join(c if c.isalnum() or c in "-_." else "_" for c in host)
    return run_dir / "timeline" / f"host-{name}.jsonl"


def read_samples(path: Path, *, last_bytes: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the lines of a host's samples. A line that a crash or a full disk has damaged is skipped.

    Args:
        path: The file.
        last_bytes: Read only the end of the file.
    """
    with path.open("rb") as file:
        if last_bytes is not None:
            start = max(0, file.seek(0, os.SEEK_END) - last_bytes)
            file.seek(max(0, start - 1))
            if start:
                file.readline()
        for line in file:
            if (entry := valid_sample(line)) is not None:
                yield entry


def valid_sample(line: bytes) -> dict[str, Any] | None:
    """Return a line of a host's samples; None for a line that is damaged."""
    entry = parse(line, finite=True)
    return entry if entry is not None and "t" in entry and fits(entry, SAMPLE) else None


def is_process(value: Any) -> bool:
    """Return whether a value has the form of a process in a sample."""
    return isinstance(value, dict) and fits(value, PROCESS)


def is_rank(name: str) -> bool:
    """Return whether a text is the number of a rank."""
    return name.isascii() and name.isdecimal() and len(name) < 10
