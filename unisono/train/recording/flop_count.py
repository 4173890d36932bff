"""Count the floating-point operations of a sample, and measure how many the device does at most.

A process of its own runs the script to its first step, computes one virtual rank under torch's FlopCounterMode, and
ends. So the run itself is not touched: a mode that sees every operator might change what is compiled, and costs time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from unisono.errors import RunStopped
from unisono.train.batches.spare_rounds import SpareRounds, gradients_aside
from unisono.train.context import Inspection, LoopParts, RunContext
from unisono.train.extensions import Extension
from unisono.train.gradient_pass import GradientPass
from unisono.train.step_state import StepState

SIZE = {"cpu": 1024}
"""Rows of the matrices whose product gives the peak, by type of device; 8192 for accelerators."""

PEAK_SECONDS = 0.5


class FlopCount(Extension):
    """Count one virtual rank of the first step, write the counts to a file, and end the run.

    Args:
        file: the file, which gets one JSON object.
        context: the context of the run.
        parts: the parts of its loop.
    """

    def __init__(self, file: Path, context: RunContext, parts: LoopParts) -> None:
        self._file, self._context, self._source = file, context, parts.source
        self._spare = SpareRounds(parts.source, context.models, parts.checks)

    def extra_rounds(self, step: StepState, gradient: GradientPass) -> Iterator[Any]:
        order = self._source.order
        samples = sum(stop - start for start, stop in order.micro_bounds(step.number, 0))
        gradient.prepare()
        with gradients_aside(gradient), FlopCounterMode(display=False) as counter:
            yield from self._spare.rounds(step, gradient, 0)
        counts = counter.get_flop_counts().get("Global", {})
        settings, device = self._context.settings, self._context.device
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(settings.precision, torch.float32)
        content = {
            "flops_per_sample": counter.get_total_flops() / max(samples, 1),
            "by_operator": {str(name): count / max(samples, 1) for name, count in counts.items()},
            "parameters": sum(p.numel() for model in self._context.models.modules for p in model.parameters()),
            "peak": dense_peak(device, dtype),
            "peak_of": f"{device.type}, {torch.get_num_threads()} thread{'s' * (torch.get_num_threads() != 1)}"
            if device.type == "cpu"
            else torch.get_device_module(device).get_device_name(device),
            "dtype": str(dtype).removeprefix("torch."),
        }
        self._file.write_text(json.dumps(content) + "\n", encoding="utf-8")
        raise RunStopped


def dense_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Return the floating-point operations in a second of a product of two large square matrices."""
    size = SIZE.get(device.type, 8192)
    a, b = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    synchronize = (lambda: None) if device.type == "cpu" else torch.get_device_module(device).synchronize
    a @ b
    synchronize()
    best, end = float("inf"), time.perf_counter() + PEAK_SECONDS
    while time.perf_counter() < end:
        began = time.perf_counter()
        a @ b
        synchronize()
        best = min(best, time.perf_counter() - began)
    return 2.0 * size**3 / best


def count_flops(request: str, rank: int) -> Inspection:
    """Return an inspection that counts operations. `request`: the file to write; `rank`: of this process."""
    return Inspection(partial(FlopCount, Path(request)))
