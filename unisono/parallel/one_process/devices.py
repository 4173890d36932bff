"""Find the devices of one process that a model is divided over or copied to, and what a machine lacks for that."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import torch

from unisono.config import plural
from unisono.errors import Problem

if TYPE_CHECKING:
    from unisono.config import CommandLine, ParallelSettings


def devices_of(parallel: ParallelSettings, home: torch.device) -> list[torch.device]:
    """Return the devices of this process: those that the settings name, or the first ones of home's type."""
    if parallel.devices:
        return [_normalized(torch.device(name)) for name in parallel.devices]
    return [
        torch.device(home.type, i) for i in range(max(parallel.model_parallel_devices, parallel.data_parallel_devices))
    ]


def _normalized(device: torch.device) -> torch.device:
    """Return the device as `tensor.device` names it. The CPU is one device, whatever its index (cpu:1)."""
    if device.type == "cpu":
        return torch.device("cpu")
    found: torch.device = torch.empty(0, device=device).device
    return found


def device_problems(parallel: ParallelSettings, processes: int, line: CommandLine) -> list[Problem]:
    """Return what this machine lacks for these settings, in a run of `processes` processes."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if kind is not None else 0
    name = kind.type if kind is not None else "cpu"
    problems: list[Problem] = []
    if parallel.compile and kind is None:
        problems += compiler_problems("parallel.compile", "true", "false", line)
    for setting in ("model_parallel_devices", "data_parallel_devices"):
        wanted = getattr(parallel, setting)
        if wanted > 1:
            problems += _problems_of(parallel, setting, wanted, (name, count), processes, line)
    return problems


def compiler_problems(name: str, value: str, instead: str, line: CommandLine) -> list[Problem]:
    """Return a problem if a setting compiles for the CPU, and no compiler for C++ is installed."""
    if shutil.which("g++") is not None or shutil.which("clang++") is not None:
        return []
    fact = "torch.compile writes C++ for the CPU, and neither g++ nor clang++ is installed."
    return [Problem(f"{name} = {value}", fact, f"apt install g++, or: {line.setting(f'{name}={instead}')}")]


def _problems_of(
    parallel: ParallelSettings, name: str, wanted: int, machine: tuple[str, int], processes: int, line: CommandLine
) -> list[Problem]:
    """Return the problems of one setting that uses several devices.

    Args:
        parallel: The settings.
        name: The name of the setting.
        wanted: Its value.
        machine: The device type of this machine, and the number of its accelerators.
        processes: The number of processes.
        line: The command line, for suggestions.
    """
    kind, count = machine
    setting = f"parallel.{name} = {wanted}"
    changes = [f"parallel.{name}=1"]
    changes += [f"parallel.shard={wanted}"] if name == "model_parallel_devices" else []
    changes += ["parallel.devices=[]"] if parallel.devices else []
    instead = str(line.setting(*changes).in_processes(wanted))
    if parallel.devices:
        problem = _naming_problem(parallel.devices, kind, count)
        if problem is not None:
            return [Problem(f"parallel.devices = {list(parallel.devices)}", problem, instead)]
    elif count < wanted:
        fact = f"This machine has {plural(count, 'accelerator')}" + (
            "." if count else ", and its CPU is one device; several processes use it better."
        )
        if name == "model_parallel_devices":
            names = ",".join(['"cpu"'] * wanted)
            try_out = f", or, to try it out: {line.setting(f'parallel.devices=[{names}]')}" if not count else ""
            return [Problem(setting, fact, f"{instead}{try_out}")]
        return [Problem(setting, fact, instead)]
    if name == "data_parallel_devices" and count < 2:
        fact = f"torch.nn.DataParallel needs a second accelerator, and this machine has {count}."
        return [Problem(setting, fact, instead)]
    if kind != "cpu" and processes > 1:
        fact = f"It uses several devices of one process, and there are {processes} processes."
        return [Problem(setting, fact, f"{line.in_processes(1)}, or: {instead}")]
    return []


def _naming_problem(names: list[str], kind: str, count: int) -> str | None:
    for name in names:
        try:
            device = torch.device(name)
        except RuntimeError:
            return f"torch has no device {name!r}; they are called {kind}:0, {kind}:1, ..."
        if device.type != kind:
            return f"This run computes on {kind}, and {device.type} has other bits."
        if device.type != "cpu" and (device.index or 0) >= count:
            return f"There is no {name}: this machine has {count}."
    return None
