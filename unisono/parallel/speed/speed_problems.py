"""What a machine lacks for the settings of the section `speed`."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch

from unisono.errors import Problem
from unisono.parallel.one_process.devices import compiler_problems
from unisono.parallel.speed.attention_backend import ON_CPU
from unisono.parallel.speed.float8_linear import INSTALL, lacks_float8

if TYPE_CHECKING:
    from unisono.config import CommandLine, SpeedSettings


def speed_problems(speed: SpeedSettings, line: CommandLine) -> list[Problem]:
    """Return what this machine lacks for these settings."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = torch.device("cpu") if found is None else found
    problems: list[Problem] = []
    if device.type == "cpu":
        if speed.compile_model:
            problems += compiler_problems("speed.compile_model", "true", "false", line)
        if speed.optimizer == "compiled":
            problems += compiler_problems("speed.optimizer", "compiled", "script", line)
        if speed.attention not in ("any", *ON_CPU):
            fact = f"The CPU has the back ends {' and '.join(ON_CPU)}."
            problems.append(
                Problem(f"speed.attention = {speed.attention}", fact, str(line.setting("speed.attention=any")))
            )
    if why := lacks_float8(speed.float8, device):
        do = f"{line.setting('speed.float8=emulated')}, which is slow, or: {line.setting('speed.float8=none')}"
        problems.append(Problem(f"speed.float8 = {speed.float8}", why, do))
    elif speed.float8 != "none" and importlib.util.find_spec("torchao") is None:
        problems.append(Problem(f"speed.float8 = {speed.float8}", "It needs torchao, which is not installed.", INSTALL))
    return problems
