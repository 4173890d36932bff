"""Sample the disks and networks of a host, from /proc and /sys.

https://docs.kernel.org/admin-guide/iostats.html
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from unisono.machine.counter_rates import CounterRates, without_none
from unisono.machine.kernel_files import KernelFiles

SECTOR = 512
"""Bytes of a sector in /proc/diskstats, whatever the disk has."""

MOST = 8
"""Disks, and network interfaces, in a sample: those with the most traffic."""

DERIVED = ("loop", "ram", "zram", "dm-", "md", "sr")
"""Names of devices that have no medium, or that are made of other devices."""


class Disks:
    """The disks of a host.

    Args:
        files: The files of Linux.
        run_dir: The run directory, whose device is always in a sample if /proc knows it.
    """

    def __init__(self, files: KernelFiles, run_dir: Path) -> None:
        self.files = files
        self._whole = {name for name in files.names("sys/block") if not name.startswith(DERIVED)}
        self._of_run = self._device_of(run_dir)

    def _device_of(self, folder: Path) -> str:
        """Return the device of a folder; "" if it has none (a network's file system, an overlay)."""
        try:
            number = os.stat(folder).st_dev
        except OSError:
            return ""
        major, minor = os.major(number), os.minor(number)
        rows = [line.split() for line in self.files.text("proc/diskstats").splitlines()]
        return next((row[2] for row in rows if row[:2] == [str(major), str(minor)]), "")

    def facts(self) -> dict[str, Any]:
        return {"run_disk": self._of_run} if self._of_run else {}

    def sample(self, rates: CounterRates) -> dict[str, Any]:
        found: dict[str, dict[str, float]] = {}
        for line in self.files.text("proc/diskstats").splitlines():
            words = line.split()
            if len(words) < 13 or (words[2] not in self._whole and words[2] != self._of_run):
                continue
            name = words[2]
            values = without_none(
                {
                    "read": rates.rate(f"{name} read", SECTOR * int(words[5])),
                    "written": rates.rate(f"{name} written", SECTOR * int(words[9])),
                }
            )
            busy = rates.rate(f"{name} busy", int(words[12]) / 1000)
            if values and busy is not None:
                found[name] = {**values, "busy": round(min(busy, 1.0), 3)}
        return {"disk": _busiest(found, keep=self._of_run)} if found else {}


class Networks:
    """The network interfaces of a host, InfiniBand included. `totals`: bytes since the first sample."""

    def __init__(self, files: KernelFiles) -> None:
        self.files = files
        self.totals: dict[str, list[float]] = {}
        folder = "sys/class/infiniband"
        self._ports = {
            f"{device}/{port}": f"{folder}/{device}/ports/{port}/counters"
            for device in files.names(folder)
            for port in files.names(f"{folder}/{device}/ports")
        }

    def facts(self) -> dict[str, Any]:
        return {}

    def sample(self, rates: CounterRates) -> dict[str, Any]:
        found: dict[str, dict[str, float]] = {}
        for name, counted in self._counters().items():
            growth = [rates.growth(f"{name} {i}", value) for i, value in enumerate(counted)]
            if None in growth or not rates.seconds:
                continue
            sent, received = (float(each or 0) for each in growth)
            totals = self.totals.setdefault(name, [0.0, 0.0])
            totals[0], totals[1] = totals[0] + sent, totals[1] + received
            found[name] = {"sent": round(sent / rates.seconds), "received": round(received / rates.seconds)}
        return {"network": _busiest(found)} if found else {}

    def _counters(self) -> dict[str, tuple[float, float]]:
        """Return the bytes that every interface has sent and received."""
        found: dict[str, tuple[float, float]] = {}
        for line in self.files.text("proc/net/dev").splitlines()[2:]:
            name, _, values = line.partition(":")
            words = values.split()
            if len(words) > 8:
                found[name.strip()] = int(words[8]), int(words[0])
        for name, folder in self._ports.items():  # in units of four bytes
            counted = [self.files.number(f"{folder}/port_{kind}_data") for kind in ("xmit", "rcv")]
            if counted[0] is not None and counted[1] is not None:
                found[name] = 4 * counted[0], 4 * counted[1]
        return found


def _busiest(found: dict[str, dict[str, float]], keep: str = "") -> dict[str, dict[str, float]]:
    """Return the devices with the most traffic, without idle ones, and `keep` in any case."""
    active = {name: sum(values.values()) for name, values in found.items() if any(values.values())}
    names = sorted(active, key=lambda name: -active[name])[:MOST]
    return {name: found[name] for name in found if name in names or name == keep}
