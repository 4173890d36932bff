"""Sample processors, memory and pressure of a host, from /proc and /sys.

https://docs.kernel.org/filesystems/proc.html and https://docs.kernel.org/accounting/psi.html
"""

from __future__ import annotations

import os
from typing import Any

from unisono.machine.counter_rates import CounterRates, without_none
from unisono.machine.kernel_files import KernelFiles, pairs_of

FREQUENCIES = 4
"""Number of cores whose frequency is read. A read may interrupt the core."""

CPU = "sys/devices/system/cpu"
THERMAL = "sys/class/thermal"
PAGE = os.sysconf("SC_PAGE_SIZE")


def usable_cores() -> set[int]:
    """Return the numbers of the cores that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


class Processors:
    """The processors of a host.

    Args:
        files: The files of Linux.
        usable: The numbers of the cores that the run may use.
    """

    def __init__(self, files: KernelFiles, usable: set[int]) -> None:
        self.files, self.usable = files, usable
        self._frequencies = [
            name
            for core in sorted(usable)[:FREQUENCIES]
            if files.text(name := f"{CPU}/cpu{core}/cpufreq/scaling_cur_freq")
        ]
        self._throttles = self._of_packages("thermal_throttle/package_throttle_total_time_ms")
        zones = [f"{THERMAL}/{zone}" for zone in files.names(THERMAL) if zone.startswith("thermal_zone")]
        types = ("x86_pkg_temp", "cpu-thermal", "cpu_thermal", "soc_thermal")
        self._zones = [f"{zone}/temp" for zone in zones if files.text(f"{zone}/type", keep=False).strip() in types]

    def _of_packages(self, file: str) -> list[str]:
        """Return the names of a file of one core of each package."""
        found = {}
        for core in sorted(self.usable):
            package = self.files.text(f"{CPU}/cpu{core}/topology/physical_package_id", keep=False).strip()
            if package not in found and self.files.text(f"{CPU}/cpu{core}/{file}", keep=False):
                found[package] = f"{CPU}/cpu{core}/{file}"
        return list(found.values())

    def facts(self) -> dict[str, Any]:
        return {"cpus": os.cpu_count() or 1, "affinity": len(self.usable)}

    def sample(self, rates: CounterRates) -> dict[str, Any]:
        found: dict[str, Any] = {}
        words = self.files.text("proc/stat").partition("\n")[0].split()
        if len(words) > 8:
            # user nice system idle iowait irq softirq steal; the guests' time after them is in user and nice already
            ticks = [int(word) for word in words[1:9]]
            total = rates.growth("cpu", sum(ticks))
            shares = {
                name: rates.growth(f"cpu {name}", value)
                for name, value in (("idle", ticks[3]), ("iowait", ticks[4]), ("steal", ticks[7]))
            }
            if total:
                share = {name: (value or 0.0) / total for name, value in shares.items()}
                found["cpu"] = round(1 - share["idle"] - share["iowait"], 3)
                found["cores"] = {name: round(share[name], 3) for name in ("iowait", "steal")}
        cores = found.setdefault("cores", {})
        load = self.files.text("proc/loadavg").split()
        if len(load) > 3:
            cores["runnable"] = int(load[3].partition("/")[0]) - 1  # this thread itself runs now
        if mhz := self._mhz():
            cores["mhz"] = round(sum(mhz) / len(mhz))
        throttled = [rates.rate(name, self.files.number(name) or 0.0) for name in self._throttles]
        if known := [each for each in throttled if each is not None]:
            cores["throttled"] = round(max(known) / 1000, 3)
        if heat := [each for name in self._zones if (each := self.files.number(name)) is not None]:
            cores["celsius"] = round(max(heat) / 1000, 1)
        return found

    def _mhz(self) -> list[float]:
        found = [self.files.number(name) for name in self._frequencies]
        return [khz / 1000 for khz in found if khz is not None]


class Memory:
    """The memory of a host."""

    def __init__(self, files: KernelFiles) -> None:
        self.files = files

    def _bytes(self) -> dict[str, int]:
        return {name: 1024 * kilobytes for name, kilobytes in pairs_of(self.files.text("proc/meminfo")).items()}

    def facts(self) -> dict[str, Any]:
        found = self._bytes()
        return {"memory": {"total": found.get("MemTotal"), "swap": found.get("SwapTotal")}} if found else {}

    def sample(self, rates: CounterRates) -> dict[str, Any]:
        memory = self._bytes()
        if not memory:
            return {}
        values: dict[str, float | None] = {"available": memory.get("MemAvailable")}
        if memory.get("SwapTotal"):
            values["swap"] = memory["SwapTotal"] - memory.get("SwapFree", 0)
            pages = pairs_of(self.files.text("proc/vmstat"))
            for name, counter in (("swap_in", "pswpin"), ("swap_out", "pswpout")):
                if counter in pages:
                    values[name] = rates.rate(counter, PAGE * pages[counter])
        return {"memory": without_none(values)}


class Pressure:
    """The share of time in which some task waited for processors, memory or disks."""

    def __init__(self, files: KernelFiles) -> None:
        self.files = files

    def facts(self) -> dict[str, Any]:
        return {}

    def sample(self, rates: CounterRates) -> dict[str, Any]:
        found: dict[str, float | None] = {}
        for kind in ("cpu", "memory", "io"):
            total = self.files.text(f"proc/pressure/{kind}").partition("\n")[0].rpartition("total=")[2]
            if total.isdecimal():
                found[kind] = rates.rate(f"pressure {kind}", int(total) / 1e6)
        known = without_none(found, 3)
        return {"pressure": known} if known else {}
