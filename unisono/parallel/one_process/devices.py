"""The devices of one process that a model is dealt over or copied to, and what a machine must have for that."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import torch

from unisono.config import plural
from unisono.errors import Problem

if TYPE_CHECKING:
    from unisono.config import CommandLine, ParallelSettings


def devices_of(parallel: ParallelSettings, home: torch.device) -> list[torch.device]:
    """The devices of this process, the first one first: those that are named, or the first ones of home's kind."""
    if parallel.devices:
        return [_as_tensors_say(torch.device(name)) for name in parallel.devices]
    return [
        torch.device(home.type, i) for i in range(max(parallel.model_parallel_devices, parallel.data_parallel_devices))
    ]


def _as_tensors_say(device: torch.device) -> torch.device:
    """What `tensor.device` is there: the CPU is one device, under as many names as one likes (cpu:1)."""
    if device.type == "cpu":
        return torch.device("cpu")
    found: torch.device = torch.empty(0, device=device).device
    return found


def device_problems(parallel: ParallelSettings, processes: int, line: CommandLine) -> list[Problem]:
    """What this machine lacks for these settings, for a run of so many processes."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if kind is not None else 0
    name = kind.type if kind is not None else "cpu"
    problems: list[Problem] = []
    if parallel.compile and kind is None and shutil.which("g++") is None and shutil.which("clang++") is None:
        true = "torch.compile writes C++ for the CPU, and neither g++ nor clang++ is found here."
        do = f"apt install g++, or: {line.setting('parallel.compile=false')}"
        problems.append(Problem("parallel.compile = true", true, do))
    for way in ("model_parallel_devices", "data_parallel_devices"):
        asked = getattr(parallel, way)
        if asked > 1:
            problems += _problems_of(parallel, way, asked, (name, count), processes, line)
    return problems


def _problems_of(
    parallel: ParallelSettings, way: str, asked: int, here: tuple[str, int], processes: int, line: CommandLine
) -> list[Problem]:
    """What is wrong with one way of using several devices. `here`: the kind of device, and how many accelerators."""
    kind, count = here
    what = f"parallel.{way} = {asked}"
    apart = [f"parallel.{way}=1"]
    apart += [f"parallel.shard={asked}"] if way == "model_parallel_devices" else []
    apart += ["parallel.devices=[]"] if parallel.devices else []
    instead = str(line.setting(*apart).in_processes(asked))
    if parallel.devices:
        problem = _misnamed(parallel.devices, kind, count)
        if problem is not None:
            return [Problem(f"parallel.devices = {list(parallel.devices)}", problem, instead)]
    elif count < asked:
        true = f"This machine has {plural(count, 'accelerator')}" + (
            "." if count else ", and its CPU is one device; a process for each part uses it as well as can be."
        )
        if way == "model_parallel_devices":
            names = ",".join(['"cpu"'] * asked)
            try_out = f", or, to try it out: {line.setting(f'parallel.devices=[{names}]')}" if not count else ""
            return [Problem(what, true, f"{instead}{try_out}")]
        return [Problem(what, true, instead)]
    if way == "data_parallel_devices" and count < 2:
        true = f"torch.nn.DataParallel needs a second accelerator, and this machine has {count}."
        return [Problem(what, true, instead)]
    if kind != "cpu" and processes > 1:
        true = f"It uses several devices of one process, and there are {processes} processes."
        return [Problem(what, true, f"{line.in_processes(1)}, or: {instead}")]
    return []


def _misnamed(names: list[str], kind: str, count: int) -> str | None:
    for name in names:
        try:
            device = torch.device(name)
        except RuntimeError:
            return f"torch knows no device {name!r}; they are called {kind}:0, {kind}:1, ..."
        if device.type != kind:
            return f"This run computes on {kind}, and the bits of {device.type} are others."
        if device.type != "cpu" and (device.index or 0) >= count:
            return f"There is no {name}: this machine has {count}."
    return None
