"""Find how much memory of a device a process may use in addition, without a risk for the run."""

from __future__ import annotations

from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch

from unisono.machine.control_group import ControlGroup
from unisono.machine.counter_rates import CounterRates
from unisono.machine.kernel_files import KernelFiles

USABLE = 0.8
"""The part of the free memory that may be used."""


def free_memory(device: torch.device, processes: int) -> int:
    """Return the bytes of a device that this process may use beyond its peak so far; 0: unknown.

    Args:
        device: The device of this process.
        processes: The number of processes that share the memory.
    """
    if device.type == "cpu":
        free = free_on_host() // processes - _below_peak()
    else:
        free = _free_on(device) // processes
    return max(int(USABLE * free), 0)


def _free_on(device: torch.device) -> int:
    """Return the free bytes of an accelerator, with those that torch has reserved and never used."""
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return 0
    free, _ = module.mem_get_info(device)
    return int(free + module.memory_reserved(device) - module.max_memory_allocated(device))


def free_on_host() -> int:
    """Return the free bytes of this host, or of the control group of this process if that has fewer."""
    free = int(psutil.virtual_memory().available)
    group = ControlGroup(KernelFiles())
    if group.memory is None:
        return free
    used = group.sample(CounterRates()).get("cgroup", {}).get("memory", 0)
    return min(free, group.memory - int(used))


def _below_peak() -> int:
    """Return by how many bytes the resident memory of this process is below its peak."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    kilobytes = {name: value.split()[0] for name, _, value in (line.partition(":") for line in lines) if value.split()}
    return 1024 * (int(kilobytes.get("VmHWM", 0)) - int(kilobytes.get("VmRSS", 0)))
