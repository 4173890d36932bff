"""Count energy: of processors and memory through RAPL, of accelerators through NVML.

RAPL (https://docs.kernel.org/power/powercap/powercap.html) has one folder for each domain:

    /sys/class/powercap/intel-rapl:0       package-0: counted
    /sys/class/powercap/intel-rapl:0:0     core, or uncore: a part of the package, not counted again
    /sys/class/powercap/intel-rapl:0:2     dram: not a part of the package, so counted
    /sys/class/powercap/intel-rapl:1       psys: a platform that contains the package, not counted
    /sys/class/powercap/intel-rapl-mmio:0  the same package through another register, not counted

AMD's processors have the same names. A counter begins anew after max_energy_range_uj, which takes minutes at full
power, so it is read every 30 s. Many systems let only root read it (CVE-2020-8694).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from unisono.machine.counter_rates import CounterRates
from unisono.machine.kernel_files import KernelFiles
from unisono.machine.nvml_devices import NvmlDevice

POWERCAP = "sys/class/powercap"
COUNTED = re.compile(r"package|dram")


@dataclass
class EnergyCounter:
    """A counter, and what it has counted since it was opened.

    Attributes:
        read: Returns the counter in joules; None: it cannot be read now.
        wraps_at: The joules at which it begins anew.
        last: The last reading.
        joules: The energy since the run began.
    """

    read: Callable[[], float | None]
    wraps_at: float
    last: float
    joules: float = 0.0

    def update(self) -> None:
        """Read the counter. A counter that has begun anew after a restart of the driver adds nothing."""
        value = self.read()
        if value is None:
            return
        grown = value - self.last if value >= self.last else value - self.last + self.wraps_at
        self.joules += grown if math.isfinite(grown) else 0.0
        self.last = value


class EnergyMeter:
    """The energy of a host.

    Args:
        files: The files of Linux.

    Attributes:
        counters: Those that can be read, by name: rapl:package-0, nvml:0.
        missing: Why others cannot be read.
    """

    def __init__(self, files: KernelFiles) -> None:
        self.files = files
        self.counters: dict[str, EnergyCounter] = {}
        self.missing: list[str] = []
        for domain in files.names(POWERCAP):
            if re.fullmatch(r"intel-rapl:\d+(:\d+)?", domain):
                self._add_domain(f"{POWERCAP}/{domain}", domain)

    def _add_domain(self, folder: str, domain: str) -> None:
        name = self.files.text(f"{folder}/name", keep=False).strip()
        if not COUNTED.match(name):
            return
        if name.startswith("dram"):
            name = f"{name}-{domain.split(':')[1]}"
        try:
            microjoules = float(self.files.path(f"{folder}/energy_uj").read_text())
            most = float(self.files.path(f"{folder}/max_energy_range_uj").read_text())
        except PermissionError as error:
            self.missing.append(f"no permission to read {error.filename}")
        except (OSError, ValueError) as error:
            self.missing.append(f"cannot read {folder}: {error}")
        else:
            counter = f"{folder}/energy_uj"
            self.counters[f"rapl:{name}"] = EnergyCounter(
                lambda: None if (value := self.files.number(counter)) is None else value / 1e6,
                most / 1e6,
                microjoules / 1e6,
            )

    def add_device(self, device: NvmlDevice) -> None:
        """Count the energy of a device from now on."""
        joules = device.joules()
        if joules is None:
            self.missing.append(f"nvml:{device.index} has no counter")
        else:
            self.counters[f"nvml:{device.index}"] = EnergyCounter(device.joules, math.inf, joules)

    def update(self) -> None:
        """Read all counters."""
        for counter in self.counters.values():
            counter.update()

    def continue_from(self, sample: Mapping[str, Any]) -> None:
        """Continue the sums of a process that has died, from its last sample, at its readings of the counters."""
        for name, entry in sample.get("energy", {}).items():
            if name in self.counters:
                counter = self.counters[name]
                counter.joules, counter.last = entry["joules"], entry["counter"]
                counter.update()

    def facts(self) -> dict[str, Any]:
        return {"not_measured": self.missing} if self.missing else {}

    def sample(self, rates: CounterRates) -> dict[str, Any]:
        self.update()
        found = {}
        for name, counter in self.counters.items():
            watts = rates.rate(f"{name} energy", counter.joules)
            found[name] = {"joules": round(counter.joules, 1), "counter": round(counter.last, 3)}
            if watts is not None:
                found[name]["watts"] = round(watts, 1)
        return {"energy": found} if found else {}
