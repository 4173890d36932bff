"""Check that this machine has the devices and the compiler that a request needs. torch is loaded only if necessary."""

from __future__ import annotations

from typing import Any

from unisono.config import CommandLine, SpeedSettings, flatten
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
    parallel, problems = settings.parallel, []
    # imports in blocks, because they take a second
    if settings.speed != SpeedSettings():
        from unisono.parallel.speed.speed_problems import speed_problems

        problems += speed_problems(settings.speed, line)
    if parallel.model_parallel_devices > 1 or parallel.data_parallel_devices > 1 or parallel.compile:
        from unisono.parallel.one_process.devices import device_problems

        problems += device_problems(parallel, processes, line)
    return problems
