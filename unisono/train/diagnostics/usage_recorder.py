"""Record how much of an accelerator a run uses: in the timeline about once a second, and in result.json."""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import mean
from typing import TYPE_CHECKING, Any

from unisono.monitor.device_usage import DeviceUsage, NvmlDevice, open_device
from unisono.train.extensions import Extension
from unisono.train.step_state import StepState

if TYPE_CHECKING:
    import torch

    from unisono.monitor.step_monitor import StepMonitor

SECONDS = 1.0
"""Time between two reads."""


class UsageRecorder(Extension):
    """Read the usage of a process's device after steps.

    Args:
        device: The device.
        monitor: Gets a line for the timeline at each read.
        source: Reads the usage, or why that is impossible.
    """

    def __init__(self, device: torch.device, monitor: StepMonitor, source: NvmlDevice | str) -> None:
        self.device, self.monitor, self.source = device, monitor, source
        self._next = time.monotonic() + SECONDS
        self._reads: list[DeviceUsage] = []
        self._first = source.read() if isinstance(source, NvmlDevice) else None

    def after_step(self, step: StepState) -> None:
        if isinstance(self.source, NvmlDevice) and time.monotonic() >= self._next:
            self._next = time.monotonic() + SECONDS
            self._reads.append(usage := self.source.read())
            self.monitor.event({"device": usage._asdict()})

    def result(self) -> Mapping[str, Any]:
        module: Any = _memory_module(self.device)
        found: dict[str, Any] = {"peak_memory": module.max_memory_allocated(self.device)} if module else {}
        if isinstance(self.source, str):
            return {"device": {**found, "usage": f"not measured: {self.source}"}}
        assert self._first is not None
        last = self.source.read()
        reads = self._reads or [last]
        found["utilization"] = round(mean(read.utilization for read in reads), 1)
        found["watts"] = round(mean(read.watts for read in reads), 1)
        found["joules"] = round(last.joules - self._first.joules, 1)
        return {"device": found}


def _memory_module(device: torch.device) -> Any:
    """Return torch's module for a device if it counts memory, else None."""
    import torch

    module: Any = torch.get_device_module(device)
    return module if hasattr(module, "max_memory_allocated") else None


def build_usage(device: torch.device, monitor: StepMonitor) -> list[UsageRecorder]:
    """Return the recorder of an accelerator; of the CPU none."""
    return [] if device.type == "cpu" else [UsageRecorder(device, monitor, open_device(device))]
