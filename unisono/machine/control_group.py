"""Sample the limits of a control group, in which containers and jobs of Slurm run: processors and memory.

Version 2 (https://docs.kernel.org/admin-guide/cgroup-v2.html) has one tree below /sys/fs/cgroup, version 1
(https://docs.kernel.org/admin-guide/cgroup-v1/) one for each kind of limit. A limit of a group also holds in the groups
inside it, so the strictest one from this process's group up to the root counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from unisono.machine.counter_rates import CounterRates, without_none
from unisono.machine.kernel_files import KernelFiles, pairs_of

ROOT = "sys/fs/cgroup"
NO_LIMIT = 1 << 60
"""Version 1 states the largest number of pages if there is no limit."""


class ControlGroup:
    """The control group of this process.

    Attributes:
        cpus: The number of cores that its quota amounts to; None: no quota.
        memory: Its largest memory in bytes; None: no limit.
    """

    def __init__(self, files: KernelFiles) -> None:
        self.files = files
        self._paths = dict(self._read_paths())
        self.cpus: float | None = None
        self.memory: int | None = None
        self._cpu_folder = self._memory_folder = ""
        if (quota := min(self._quotas(), default=None)) is not None:
            self.cpus, self._cpu_folder = quota
        if (limit := min(self._memory_limits(), default=None)) is not None:
            self.memory, self._memory_folder = limit

    def _read_paths(self) -> Iterator[tuple[str, str]]:
        """Yield the path of this process's group by controller; "" is version 2."""
        for line in self.files.text("proc/self/cgroup", keep=False).splitlines():
            _, controllers, path = [*line.split(":", 2), "", ""][:3]
            for controller in controllers.split(","):
                yield controller, path.strip("/")

    def _folders(self, controller: str, version: int) -> Iterator[str]:
        """Yield the folders from this process's group up to the root.

        A container may see a path of the host that does not exist inside; then its own group is the root.
        """
        base = ROOT if version == 2 else f"{ROOT}/{controller}"
        parts = self._paths.get("" if version == 2 else controller, "").split("/")
        for length in range(len(parts), -1, -1):
            folder = "/".join([base, *filter(None, parts[:length])])
            if self.files.path(folder).is_dir():
                yield folder

    def _quotas(self) -> Iterator[tuple[float, str]]:
        for folder in self._folders("cpu", 2):
            quota, _, period = self.files.text(f"{folder}/cpu.max", keep=False).strip().partition(" ")
            if quota.isdecimal() and period.isdecimal():
                yield int(quota) / int(period), folder
        for folder in self._folders("cpu", 1):
            quota_us = self.files.number(f"{folder}/cpu.cfs_quota_us", keep=False)
            period_us = self.files.number(f"{folder}/cpu.cfs_period_us", keep=False)
            if quota_us and quota_us > 0 and period_us:
                yield quota_us / period_us, folder

    def _memory_limits(self) -> Iterator[tuple[int, str]]:
        for version, file in ((2, "memory.max"), (1, "memory.limit_in_bytes")):
            for folder in self._folders("memory", version):
                limit = self.files.number(f"{folder}/{file}", keep=False)  # "max" is no number
                if limit is not None and limit < NO_LIMIT:
                    yield int(limit), folder

    def facts(self) -> dict[str, Any]:
        found = without_none({"cpus": self.cpus}, 3) | without_none({"memory": self.memory})
        return {"cgroup": found} if found else {}

    def sample(self, rates: CounterRates) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self._cpu_folder:
            found |= self._throttling(rates)
        if self._memory_folder:
            found |= self._memory_in_use(rates)
        return {"cgroup": found} if found else {}

    def _throttling(self, rates: CounterRates) -> dict[str, float]:
        counted = pairs_of(self.files.text(f"{self._cpu_folder}/cpu.stat"))
        seconds = counted["throttled_usec"] / 1e6 if "throttled_usec" in counted else None
        if "throttled_time" in counted:  # nanoseconds, in version 1
            seconds = counted["throttled_time"] / 1e9
        periods = rates.growth("periods", counted.get("nr_periods", 0))
        throttled = rates.growth("throttled periods", counted.get("nr_throttled", 0))
        share = throttled / periods if periods and throttled is not None else 0.0 if periods == 0 else None
        rate = None if seconds is None else rates.rate("throttled", seconds)
        return without_none({"throttled": rate, "throttled_periods": share}, 3)

    def _memory_in_use(self, rates: CounterRates) -> dict[str, float]:
        """Return the memory in use. Files in it that were not used recently do not count: they can be dropped."""
        folder = self._memory_folder
        number = self.files.number
        used = number(f"{folder}/memory.current") or number(f"{folder}/memory.usage_in_bytes")
        if used is None:
            return {}
        stat = pairs_of(self.files.text(f"{folder}/memory.stat"))
        droppable = stat.get("total_inactive_file", stat.get("inactive_file", 0))
        kills = pairs_of(self.files.text(f"{folder}/memory.events")).get("oom_kill")
        kills = pairs_of(self.files.text(f"{folder}/memory.oom_control")).get("oom_kill") if kills is None else kills
        grown = None if kills is None else rates.growth("oom kills", kills)
        return without_none({"memory": max(used - droppable, 0), "oom_kills": grown or None})


def memory_of_host(files: KernelFiles) -> int:
    """Return the bytes of memory of this host, or of the control group of this process; 0: not known."""
    total = 1024 * pairs_of(files.text("proc/meminfo", keep=False)).get("MemTotal", 0)
    limit = ControlGroup(files).memory
    return min(total or limit, limit) if limit is not None else total


def oom_kills(files: KernelFiles) -> int:
    """Return how many processes this host has killed for memory since its start, those of control groups included."""
    return pairs_of(files.text("proc/vmstat", keep=False)).get("oom_kill", 0)
