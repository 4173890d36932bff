"""Check that this machine has the devices and the compiler that a request needs. torch is loaded only if necessary."""

from __future__ import annotations

from typing import Any

from unisono.config import CommandLine, flatten
from unisono.config.conflicts import problems_on_mixed_devices
from unisono.errors import Problem


def problems_where_mixed(settings: Any, line: CommandLine) -> list[Problem]:
    """Return what does not work on accelerators and the CPU together, if this machine has both."""
    problems = problems_on_mixed_devices(flatten(settings), line)
    if problems:
        import torch

        return problems if torch.accelerator.is_available() else []
    return []


def problems_here(settings: Any, processes: int, line: CommandLine) -> list[Problem]:
    """Return what this machine lacks for valid settings and this number of processes."""
    parallel = settings.parallel
    if parallel.model_parallel_devices == parallel.data_parallel_devices == 1 and not parallel.compile:
        return []
    from unisono.parallel.one_process.devices import device_problems  # here, because it takes a second

    return device_problems(parallel, processes, line)
