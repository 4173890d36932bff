"""Measure GPU memory beside a loop by hand, and how long a step waits for a checkpoint.

    python -m benchmarks.gpu.memory

Peaks are bytes of tensors, and are compared in gradient copies: one is the size of all parameters. The state of the
checkpoint is the model with AdamW's moments.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.device import Device, measured_device
from benchmarks.gpu.models import GPT, Task, loss_of, tasks, tokens
from benchmarks.machine import parser, show
from unisono.config import CheckpointSettings, ParallelSettings, PromiseSettings, Settings
from unisono.distributed.init import join_process_group as join
from unisono.environment import World
from unisono.testing import build_run, close_run
from unisono.train.guarantees.deterministic_kernels import fix_kernels

STEPS = 4


def by_hand(task: Task, device: Device) -> int:
    """Return the peak of a loop by hand."""
    x, y = (tensor.to(device.device) for tensor in task.data(task.batch)[:])
    device.reset_peak()
    model = task.build().to(device.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(STEPS):
        with torch.autocast(device.device.type, torch.bfloat16):
            out = model(x)
        loss_of(out.float(), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return device.peak_bytes()


def ours(task: Task, device: Device, virtual_ranks: int, checkpoint: Any = "none") -> int:
    """Return the peak of our loop."""
    parallel = ParallelSettings(activation_checkpoint=checkpoint)
    with tempfile.TemporaryDirectory() as folder, join(World()) as group:
        settings = Settings(
            steps=STEPS,
            batch=task.batch,
            virtual_ranks=virtual_ranks,
            precision="bf16",
            parallel=parallel,
            promise=PromiseSettings(check=False),
        )
        device.reset_peak()
        run = build_run(settings, World(), group, Path(folder))
        model = run.place(task.build)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(task.data(task.batch)):
            for x, y in step:
                step.backward(loss_of(model(x), y), weight=y.numel())
            step.update(optimizer)
        close_run(run)
        return device.peak_bytes()


def checkpoint_stall(device: Device) -> dict[str, float]:
    """Return the size of a state in bytes, and how much longer the steps are that save it."""
    width, depth = (32, 2) if device.dry else (1024, 12)
    every, seconds = 4, list[float]()
    with tempfile.TemporaryDirectory() as folder, join(World()) as group:
        checkpoint = CheckpointSettings(every=every, keep=1)
        settings = Settings(
            steps=4 * every,
            batch=8,
            virtual_ranks=1,
            precision="bf16",
            checkpoint=checkpoint,
            promise=PromiseSettings(check=False),
        )
        run = build_run(settings, World(), group, Path(folder))
        model = run.place(lambda: GPT(width, depth, 2 if device.dry else 16, 128, 256 if device.dry else 16_384))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        run.track(model=model, optimizer=optimizer)
        start = time.perf_counter()
        for step in run.steps(tokens(64, 128, 256)):
            device.synchronize()
            seconds.append(time.perf_counter() - start)
            start = time.perf_counter()
            for x, y in step:
                step.backward(loss_of(model(x), y), weight=y.numel())
            step.update(optimizer)
            time.sleep(0.0 if device.dry else 0.5)  # the file of the last checkpoint is written meanwhile
        size = 12 * sum(p.numel() for p in model.parameters())
        close_run(run)
    numbered = dict(enumerate(seconds[1:]))  # the time of step n, with the save after it
    saving = [s for n, s in numbered.items() if (n + 1) % every == 0 and n > every]  # the first save allocates
    others = sorted(s for n, s in numbered.items() if (n + 1) % every and n > 1)
    usual = others[len(others) // 2]
    return {"bytes": size, "step": usual, "stall": min(saving) - usual, "longest stall": max(saving) - usual}


def measure(device: Device) -> dict[str, Any]:
    fix_kernels(device.device, PromiseSettings())
    task = tasks(small=device.dry)["GPT"]
    parameters = sum(p.numel() for p in task.build().parameters())
    arms: dict[str, Callable[[], int]] = {
        "by hand": lambda: by_hand(task, device),
        "V = 1": lambda: ours(task, device, 1),
        "V = 8": lambda: ours(task, device, 8),
        "V = 1, recompute": lambda: ours(task, device, 1, "full"),
    }
    peaks = {}
    for name, arm in arms.items():
        gc.collect()
        peaks[name] = arm()
    gc.collect()
    return {"gradient": 4 * parameters, "peaks": peaks, "checkpoint": checkpoint_stall(device)}


def table(found: dict[str, Any]) -> str:
    copy, hand, saved = found["gradient"], found["peaks"]["by hand"], found["checkpoint"]
    lines = [
        f"| GPT, a gradient copy is {copy / 2**20:.0f} MB | peak, MB | more than by hand, in copies |",
        "|---|---|---|",
    ]
    lines += [f"| {name} | {peak / 2**20:.0f} | {(peak - hand) / copy:+.2f} |" for name, peak in found["peaks"].items()]
    lines += [
        "",
        f"A checkpoint of {saved['bytes'] / 2**30:.2f} GB makes its step {1e3 * saved['stall']:.0f} ms longer (at most "
        f"{1e3 * saved['longest stall']:.0f} ms).",
    ]
    return "\n".join(lines)


def main() -> None:
    args = parser(__doc__).parse_args()
    device = measured_device()
    found = measure(device)
    show("gpu.memory", {"device": device.name, **found}, lambda: table(found), as_json=args.json)


if __name__ == "__main__":
    main()
