"""Time the steps of a run, and survey what it computes with (`unisono speedup`).

    FOLDER/rank-N.json    {"seconds": [of each step], "memory": bytes, ...}

A step is measured from its beginning to the end of its update. So an evaluation between two steps does not count.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from unisono.errors import RunStopped
from unisono.parallel.speed.convolution_format import FORMATS
from unisono.parallel.speed.float8_linear import fits_float8
from unisono.security.file_modes import make_folder, write_text
from unisono.train.context import Inspection, LoopParts, RunContext
from unisono.train.extensions import Extension
from unisono.train.optimization.step_kernels import has_kernels
from unisono.train.step_state import StepState

SURVEY = "survey"


class StepTimer(Extension):
    """Time the steps of this process, and end the run after some of them.

    Args:
        file: the file to write.
        steps: the number of steps.
        context: the context of the run.
        parts: the parts of its loop.
        survey: whether to look for attention in the first step, which is slower.
    """

    def __init__(self, file: Path, steps: int, context: RunContext, parts: LoopParts, *, survey: bool) -> None:
        self.file, self.steps, self.context, self.parts = file, steps, context, parts
        self._seconds: list[float] = []
        self._began = 0.0
        self._calls = AttentionCalls()
        self._observes = survey

    def before_step(self, step: StepState) -> None:
        if step.number >= self.steps:
            raise RunStopped
        if self._observes:
            self._calls.__enter__()
        self._began = time.perf_counter()

    def updated(self, step: StepState) -> None:
        device = self.context.device
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        self._seconds.append(time.perf_counter() - self._began)
        if self._observes:
            self._calls.__exit__(None, None, None)
            self._observes = False
        content = {"seconds": self._seconds, "memory": peak_memory(device), "device": device.type, **self._survey()}
        write_text(self.file, json.dumps(content) + "\n")

    def _survey(self) -> dict[str, Any]:
        """Return what the run computes with, as far as settings of `speed` can change it."""
        models = self.context.models.modules
        modules = [module for model in models for module in model.modules()]
        return {
            "convolutions": sum(isinstance(module, tuple(FORMATS)) for module in modules),
            "float8_layers": sum(map(fits_float8, modules)),
            "attention_calls": self._calls.count,
            "optimizers": [
                {
                    "name": type(each).__name__,
                    **{way: has_kernels(each, way) for way in ("foreach", "fused", "compiled")},
                }
                for each in self.parts.checks.steppers
                if hasattr(each, "param_groups")
            ],
        }


class AttentionCalls(TorchFunctionMode):
    """Count the calls of scaled_dot_product_attention."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Count a call, and pass it on."""
        self.count += func is F.scaled_dot_product_attention
        return func(*args, **(kwargs or {}))


def peak_memory(device: torch.device) -> int:
    """Return the peak memory of this process in bytes: of its accelerator, or on the CPU its resident memory."""
    if device.type != "cpu":
        return int(torch.get_device_module(device).max_memory_allocated(device))
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        return 0
    peak = next((line for line in status.splitlines() if line.startswith("VmHWM:")), "VmHWM: 0 kB")
    return int(peak.split()[1]) * 1024


def time_run(request: str, rank: int) -> Inspection:
    """Return an inspection that times steps. `request`: STEPS:[survey]:FOLDER; `rank`: of this process."""
    steps, survey, folder = request.split(":", 2)
    make_folder(Path(folder))
    file = Path(folder) / f"rank-{rank}.json"
    return Inspection(partial(StepTimer, file, int(steps), survey=survey == SURVEY))
