"""Measure the steps of a run: the time of each phase, and the memory of this process.

    FOLDER/rank-N.json    {"steps": [{"forward": seconds, ...}, ...], "memory": {"start": bytes, "peak": bytes}, ...}
    "cpu"                 the CPU time of the machine and of this process while steps were timed

The memory of a process on a CPU is its resident memory, shared memory counted once, over all processes that map it.
Resident memory at the beginning of the first step is that of Python, torch, the data and the model.
"""

from __future__ import annotations

import gc
import json
import math
import time
from collections import defaultdict
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from unisono import phases
from unisono.costs.recorded_costs import WARM_UP
from unisono.errors import RunStopped
from unisono.security.file_modes import make_folder, write_text
from unisono.train.context import Inspection, LoopParts, RunContext
from unisono.train.costs.cpu_time import CpuTime
from unisono.train.extensions import Extension
from unisono.train.step_state import StepState

TIMED_SECONDS = 1.5
"""Short steps vary: more of them are measured, until those that are timed take this long together."""

MOST_MORE = 60
"""The most steps that are measured in addition."""

STATUS, ROLLUP, CLEAR = (Path("/proc/self") / name for name in ("status", "smaps_rollup", "clear_refs"))


class StepCosts(Extension):
    """Measure the steps of this process, and end the run after some of them: more of them if they are short.

    Args:
        file: The file to write.
        steps: The least number of steps.
        context: The context of the run.
        parts: The parts of its loop.
    """

    def __init__(self, file: Path, steps: int, context: RunContext, parts: LoopParts) -> None:
        self._file, self._limit, self._context, self._parts = file, steps, context, parts
        self._steps: list[dict[str, float]] = []
        self._is_final = False  # whether the number of steps is
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._rounds = 0
        self._began = self._changed = 0.0
        self._waited = 0.0
        self._memory = {"start": 0, "peak": 0}
        self._cpu = CpuTime()
        phases.observe(self._on_phase)

    def _on_phase(self, left: str, _: str) -> None:
        if self._context.device.type != "cpu":
            torch.accelerator.synchronize(self._context.device)
        now = time.perf_counter()
        self._seconds[left] += now - self._changed
        self._changed = now

    def before_step(self, step: StepState) -> None:
        if step.number >= self._limit and not self._is_final:
            self._limit += self._more()
            self._is_final = True
        if step.number >= self._limit:
            self._write()
            raise RunStopped
        if step.number == 0:
            gc.collect()
            self._memory["start"] = reset_peak(self._context.device)
        if step.number == WARM_UP:
            self._cpu = CpuTime()
        self._context.group.barrier()
        self._seconds.clear()
        self._rounds, self._waited = 0, phases.CommWait.seconds
        self._began = self._changed = time.perf_counter()

    def _more(self) -> int:
        """Return the number of steps to add: the same one on all processes."""
        timed = [step["seconds"] for step in self._steps[WARM_UP:]]
        group = self._context.group
        longest = float(group.max_(torch.tensor([median(timed or [0.0])], device=group.device)).item())
        return min(MOST_MORE, max(0, math.ceil(TIMED_SECONDS / longest) - len(timed))) if longest else 0

    def round_done(self, step: StepState, place: Any) -> None:
        self._rounds += 1

    def updated(self, step: StepState) -> None:
        now = time.perf_counter()
        found = {name: self._seconds[name] for name in ("data", "forward", "backward", "exchange", "update", "other")}
        found |= {"seconds": now - self._began, "rounds": self._rounds}
        found["waited"] = phases.CommWait.seconds - self._waited
        self._steps[step.number :] = [found]  # an update after each pass of a step: the last one counts
        device = self._context.device
        self._context.group.barrier()  # no process frees shared memory before all have read how much they share
        self._memory["peak"] = peak_memory(device) - others_shared_memory(device)
        self._context.group.barrier()

    def settle(self) -> None:
        self._write()  # the script has fewer steps

    def _write(self) -> None:
        """Write the record. It loads what a process that shards a model loads, so all memory is measured before."""
        cpu, before = self._cpu.read(), _kilobytes(STATUS, "VmRSS")
        from unisono.train.costs.memory_parts import lengths, state_bytes

        self._memory["shard_imports"] = max(0, _kilobytes(STATUS, "VmRSS") - before) * 1024
        context, order = self._context, self._parts.source.order
        content = {
            "steps": self._steps,
            "memory": self._memory,
            "cpu": cpu,
            "device": context.device.type,
            "state": state_bytes(context.models.modules, self._parts.checks.steppers, context.settings),
            "micro_batches": [len(order.micro_bounds(0, v)) for v in range(order.virtual_ranks)],
            "samples": order.batch_size(0),
            "virtual_ranks": order.virtual_ranks,
            "ranks": context.group.size,
            "threads": torch.get_num_threads(),
            "recompute": context.settings.parallel.activation_checkpoint,
            "precision": context.settings.precision,
            **lengths(context.settings, order.steps_per_epoch),
        }
        write_text(self._file, json.dumps(content) + "\n")

    def close(self) -> None:
        phases.unobserve(self._on_phase)


def _kilobytes(file: Path, name: str) -> int:
    """Return a field of a file of /proc; 0 where there is none."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)


def reset_peak(device: torch.device) -> int:
    """Begin to measure the peak memory of this process. Return the bytes that it has now."""
    if device.type != "cpu":
        module = torch.get_device_module(device)
        module.reset_peak_memory_stats(device)
        return int(module.memory_allocated(device))
    with suppress(OSError):  # then the peak includes what the script has needed before its loop
        CLEAR.write_text("5", encoding="utf-8")
    return _kilobytes(STATUS, "VmRSS") * 1024


def peak_memory(device: torch.device) -> int:
    """Return the most bytes of memory that this process has had since `reset_peak`."""
    if device.type != "cpu":
        return int(torch.get_device_module(device).max_memory_allocated(device))
    return _kilobytes(STATUS, "VmHWM") * 1024


def others_shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory of this process that are attributed to others (proportional set size)."""
    if device.type != "cpu":
        return 0
    return max(0, _kilobytes(STATUS, "RssShmem") - _kilobytes(ROLLUP, "Pss_Shmem")) * 1024


def measure_costs(request: str, rank: int) -> Inspection:
    """Return an inspection that measures steps. `request`: STEPS:FOLDER; `rank`: of this process."""
    steps, folder = request.split(":", 1)
    make_folder(Path(folder))
    return Inspection(partial(StepCosts, Path(folder) / f"rank-{rank}.json", int(steps)))
