"""CPU time of this machine and of this process while steps are timed. The difference is that of other programs."""

from __future__ import annotations

import os
import time
from contextlib import suppress

import psutil  # type: ignore[import-untyped]

BUSY = ("user", "nice", "system", "irq", "softirq", "steal")


class CpuTime:
    """CPU time since this object was made, in seconds over all cores."""

    def __init__(self) -> None:
        self._began, self._machine, self._own = time.perf_counter(), machine_seconds(), own_seconds()

    def read(self) -> dict[str, float]:
        """Return the time that has passed, and the CPU time of the machine and of this process with its workers."""
        return {
            "seconds": time.perf_counter() - self._began,
            "machine": machine_seconds() - self._machine,
            "own": own_seconds() - self._own,
        }


def machine_seconds() -> float:
    """Return the CPU time of all programs since the machine started."""
    times = psutil.cpu_times()
    return float(sum(getattr(times, name, 0.0) for name in BUSY))


def own_seconds() -> float:
    """Return the CPU time of this process and its descendants, such as workers of loaders."""
    found = sum(os.times()[:4])  # with descendants that have ended
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            times = child.cpu_times()
            found += times.user + times.system
    return found
