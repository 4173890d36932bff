"""Combine the sources of a host's samples, and write their lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from unisono.machine.control_group import ControlGroup
from unisono.machine.counter_rates import CounterRates
from unisono.machine.energy_counters import EnergyMeter
from unisono.machine.host_load import Memory, Pressure, Processors, usable_cores
from unisono.machine.host_traffic import Disks, Networks
from unisono.machine.kernel_files import KernelFiles
from unisono.machine.nvml_devices import Devices
from unisono.machine.run_processes import RunProcesses
from unisono.machine.sample_file import SampleFile, samples_path

SHORTEST = 0.2
"""Seconds after a line in which no other one is written at the end: its rates would be noise."""


@dataclass(frozen=True, kw_only=True)
class SampledRun:
    """The run whose host is sampled, as one of its processes knows it.

    Attributes:
        run_dir: The run directory.
        host: The name of this host.
        rank: The number of this process.
        ranks: The number of processes of the run on this host.
        threads: The number of torch's threads in each.
        every: Seconds between samples, at least.
        device: The UUID of the accelerator of this process; "": none that NVML knows.
        root: The folder that has proc/ and sys/.
    """

    run_dir: Path
    host: str
    rank: int
    ranks: int
    threads: int
    every: float
    device: str = ""
    root: Path = field(default=Path("/"))

    @property
    def samples(self) -> Path:
        """The file for the samples."""
        return samples_path(self.run_dir, self.host)

    @property
    def processes(self) -> Path:
        """The file in which the processes of this host register. The one that samples has a lock on it."""
        return self.samples.with_suffix(".ranks")


class Source(Protocol):
    """A part of each sample."""

    def facts(self) -> dict[str, Any]:
        """Return entries of the first line."""
        ...

    def sample(self, rates: CounterRates) -> dict[str, Any]:
        """Return entries of a sample. The first one, whose rates are not known, is not written."""
        ...


class Sampler:
    """Take samples of a host, and write them.

    Args:
        run: The run.
        note: Is called with a sentence about each source that fails; it is left out from then on.

    Attributes:
        energy: The energy since the sampler was built.
        networks: The traffic since then.
        devices: The accelerators.

    Raises:
        OSError: The file of the samples cannot be written.
    """

    def __init__(self, run: SampledRun, note: Callable[[str], None]) -> None:
        files = KernelFiles(run.root)
        usable = usable_cores()
        self.run, self._note = run, note
        self._files, self._rates, self._file = files, CounterRates(), SampleFile(run.samples)
        group, processes = ControlGroup(files), RunProcesses(files, run.processes)
        self.energy, self.networks = EnergyMeter(files), Networks(files)
        self.devices = Devices(lambda: processes.devices, self.energy.add_device)
        self._cores = min(len(usable), group.cpus or len(usable))
        self._sources: list[Source] = [
            Processors(files, usable),
            Memory(files),
            Pressure(files),
            group,
            Disks(files, run.run_dir),
            self.networks,
            processes,
            self.devices,
            self.energy,
        ]

    def begin(self) -> None:
        """Write the line of facts, and read all counters for the first time."""
        run = self.run
        facts = {"host": run.host, "rank": run.rank, "every": run.every, "cores": round(self._cores, 3)}
        facts |= {"ranks": run.ranks, "threads": run.threads}
        for entries in self._each(lambda source: source.facts()):
            facts |= entries
        self._file.write({"t": round(time.time(), 3), "start": facts})
        self._rates.begin(time.monotonic())
        self._each(self._sample_of)

    def sample(self) -> float:
        """Write a sample. Return the seconds until the next one."""
        self._rates.begin(time.monotonic())
        entry: dict[str, Any] = {"t": round(time.time(), 3)}
        for entries in self._each(self._sample_of):
            entry |= entries
        self._file.write(entry)
        return self._file.interval(self.run.every)

    def end(self, *, over: bool) -> None:
        """Write the last sample, and close all files. `over`: state that no other process shall continue."""
        try:
            if self._rates.age(time.monotonic()) > SHORTEST:
                self.sample()
            else:
                self.energy.update()
            if over:
                self._file.write({"t": round(time.time(), 3), "end": {"rank": self.run.rank}})
        finally:
            self._file.close()
            self._files.forget()

    def _sample_of(self, source: Source) -> dict[str, Any]:
        return source.sample(self._rates)

    def _each(self, read: Callable[[Source], dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """Return what all sources state. One that fails is named, and left out from then on."""
        found = []
        for source in list(self._sources):
            try:
                found.append(read(source))
            except Exception as error:
                self._sources.remove(source)
                what = type(source).__name__.lower()
                self._note(f"The samples of this host lack its {what}: {type(error).__name__}: {error}.")
        return found
