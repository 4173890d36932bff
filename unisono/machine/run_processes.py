"""Sample the processes of a run on a host, and the workers of their loaders, from /proc.

Every process of the run registers itself in a file, `timeline/host-NAME.ranks`, with a line of JSON:

    {"rank": 0, "pid": 4711, "begun": 123456, "device": "GPU-..."}

`begun` is the start time of the process in clock ticks, so that a process which later gets the same id is no mistake.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from unisono.machine.counter_rates import CounterRates, without_none
from unisono.machine.kernel_files import KernelFiles, pairs_of
from unisono.security.file_modes import make_folder, open_like_folder

TICK = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


class ProcessStat(NamedTuple):
    """A part of /proc/PID/stat: seconds of CPU, threads, start in clock ticks, resident bytes, major page faults."""

    cpu: float
    threads: int
    begun: int
    resident: int
    faults: int


def read_stat(files: KernelFiles, pid: int, *, keep: bool = True) -> ProcessStat | None:
    """Return the state of a process, or None if there is none or it is dead.

    https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html
    """
    words = files.text(f"proc/{pid}/stat", keep=keep).rpartition(")")[2].split()
    if len(words) < 22 or words[0] in "ZX":
        return None
    ticks = int(words[11]) + int(words[12])
    return ProcessStat(ticks / TICK, int(words[17]), int(words[19]), PAGE * int(words[21]), int(words[9]))


def cores_in(allowed: str) -> int:
    """Return the number of cores in a list such as 0-3,8."""
    ends = [part.split("-") for part in allowed.split(",") if part]
    return sum(int(each[-1]) - int(each[0]) + 1 for each in ends)


def register(path: Path, files: KernelFiles, rank: int, device: str = "") -> None:
    """Add this process to the file of those that are sampled.

    Args:
        path: The file.
        files: The files of Linux.
        rank: The number of this process in its run.
        device: The UUID of its accelerator; "": none that NVML knows.

    Raises:
        OSError: The file cannot be written.
    """
    stat = read_stat(files, os.getpid(), keep=False)
    entry = {"rank": rank, "pid": os.getpid(), "begun": stat.begun if stat else 0, "device": device}
    make_folder(path.parent)
    file = open_like_folder(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
    try:
        os.write(file, json.dumps(entry).encode() + b"\n")
    finally:
        os.close(file)


class RunProcesses:
    """The processes of a run on this host.

    Args:
        files: The files of Linux.
        path: The file in which they register.
    """

    def __init__(self, files: KernelFiles, path: Path) -> None:
        self.files, self.path = files, path
        self._size = -1
        self._known: dict[int, dict[str, Any]] = {}

    @property
    def devices(self) -> list[str]:
        """The UUIDs of the accelerators of the processes that live."""
        self._refresh()
        alive = [each for each in self._known.values() if self._stat(each) is not None]
        return sorted({each["device"] for each in alive if each.get("device")})

    def facts(self) -> dict[str, Any]:
        return {}

    def sample(self, rates: CounterRates) -> dict[str, Any]:
        self._refresh()
        found = {}
        for rank, entry in sorted(self._known.items()):
            stat = self._stat(entry)
            if stat is None:
                self._known.pop(rank)
                self.files.forget(f"proc/{entry['pid']}/")
            else:
                found[str(rank)] = self._of_process(entry["pid"], stat, rates)
        return {"processes": found}

    def _refresh(self) -> None:
        """Read which processes have registered, if the file has grown."""
        try:
            if (size := self.path.stat().st_size) == self._size:
                return
            lines = self.path.read_bytes().splitlines()
        except OSError:
            return
        self._size = size
        for line in lines:
            try:
                entry = json.loads(line)
                self._known[int(entry["rank"])] = {**entry, "pid": int(entry["pid"])}
            except (ValueError, KeyError, TypeError):
                continue  # cut off by a crash

    def _stat(self, entry: dict[str, Any]) -> ProcessStat | None:
        stat = read_stat(self.files, entry["pid"])
        return stat if stat is not None and stat.begun == entry["begun"] else None

    def _of_process(self, pid: int, stat: ProcessStat, rates: CounterRates) -> dict[str, Any]:
        text = self.files.text
        words, io = text(f"proc/{pid}/status"), pairs_of(text(f"proc/{pid}/io"))
        status, allowed = pairs_of(words), words.partition("Cpus_allowed_list:")[2].partition("\n")[0].strip()
        delay = text(f"proc/{pid}/schedstat").split()  # of the main thread: ns running, ns waiting for a core
        shares = {"cpu": rates.rate(f"{pid} cpu", stat.cpu)}
        if len(delay) > 1:
            shares["delayed"] = rates.rate(f"{pid} delay", int(delay[1]) / 1e9)
        values: dict[str, float | None] = {"resident": stat.resident, "threads": stat.threads}
        for name, key in (("peak", "VmHWM"), ("swap", "VmSwap")):
            if status.get(key):
                values[name] = 1024 * status[key]
        for name, key in (("read", "read_bytes"), ("written", "write_bytes")):
            if key in io:
                values[name] = rates.rate(f"{pid} {key}", io[key])
        values["faults"] = rates.rate(f"{pid} faults", stat.faults)
        known = {name: value for name, value in without_none(values).items() if value}
        bound = {"allowed": allowed} if 0 < cores_in(allowed) < (os.cpu_count() or 1) else {}
        return {**without_none(shares, 3), **known, **bound, **self._workers(pid, rates)}

    def _workers(self, pid: int, rates: CounterRates) -> dict[str, Any]:
        """Return the sum over the children of a process, where the kernel lists them (CONFIG_PROC_CHILDREN)."""
        pids = [int(word) for word in self.files.text(f"proc/{pid}/task/{pid}/children").split()]
        stats = {child: stat for child in pids if (stat := read_stat(self.files, child, keep=False)) is not None}
        if not stats:
            return {}
        used = [rates.rate((child, stat.begun), stat.cpu) or 0.0 for child, stat in stats.items()]
        resident = sum(stat.resident for stat in stats.values())
        return {"workers": {"count": len(stats), "cpu": round(sum(used), 3), "resident": resident}}
