"""Measure training steps on one GPU: ours with 1 to 16 virtual ranks, beside loops by hand.

    python -m benchmarks.gpu.steps              three models
    python -m benchmarks.gpu.steps --model GPT

All arms alternate in blocks of steps in one process, with the same batch and precision. The loops by hand use the same
deterministic kernels. `by hand, fastest` leaves torch's defaults, to show what determinism costs.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks.gpu.device import Device, measured_device
from benchmarks.gpu.models import Task, loss_of, tasks
from benchmarks.machine import parser, ratio, show, spread
from unisono.config import LoaderSettings, ParallelSettings, PromiseSettings, Settings
from unisono.distributed.init import join_process_group as join
from unisono.environment import World
from unisono.testing import build_run
from unisono.train.guarantees.deterministic_kernels import fix_kernels

VIRTUAL_RANKS = (1, 2, 4, 8, 16)


def use_deterministic(on: bool) -> None:
    """Choose torch's deterministic kernels, or its default ones."""
    torch.use_deterministic_algorithms(on)
    torch.backends.cudnn.deterministic = on


def by_hand(task: Task, device: Device, block: int, parts: int, *, deterministic: bool) -> Iterator[None]:
    """Train with a loop by hand, which accumulates `parts` micro-batches. Each `next` takes a block of steps."""
    data = task.data(task.batch * block)
    loader: Any = DataLoader(data, task.batch // parts, shuffle=True, pin_memory=not device.dry, drop_last=True)
    model = task.build().to(device.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    dtype = torch.bfloat16 if task.precision == "bf16" else torch.float32
    while True:
        use_deterministic(deterministic)
        for number, batch in enumerate(loader, 1):
            x, y = (tensor.to(device.device, non_blocking=True) for tensor in batch)
            with torch.autocast(device.device.type, dtype, enabled=task.precision == "bf16"):
                out = model(x)
            (loss_of(out.float(), y) / (task.batch * task.units)).backward()
            if number % parts == 0:
                optimizer.step()
                optimizer.zero_grad()
        yield


def ours(
    task: Task, device: Device, block: int, virtual_ranks: int, group: Any, folder: Path, *, graphs: bool = False
) -> Iterator[None]:
    """Train with our loop. Each `next` takes a block of steps; `graphs`: replay micro-batches as CUDA graphs."""
    settings: Any = Settings(
        epochs=1000,
        batch=task.batch,
        virtual_ranks=virtual_ranks,
        precision=task.precision,  # type: ignore[arg-type]
        loader=LoaderSettings(workers=0),
        promise=PromiseSettings(check=False),
        parallel=ParallelSettings(cuda_graphs=graphs),
    )
    folder.mkdir()
    run = build_run(settings, World(), group, folder)
    model = run.place(task.build)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(task.data(task.batch * block)):
        if graphs:
            step.run(model, lambda out, _, y: (loss_of(out, y), y.numel()))
        for x, y in () if graphs else step:
            step.backward(loss_of(model(x), y), weight=y.numel())
        step.update(optimizer)
        if (step.number + 1) % block == 0:
            yield


def measure(task: Task, device: Device, *, pairs: int, block: int) -> dict[str, Any]:
    """Return the seconds per step of every arm, by name."""
    with tempfile.TemporaryDirectory() as name, join(World()) as group:
        fix_kernels(device.device, PromiseSettings())
        build: dict[str, Callable[[], Iterator[None]]] = {
            "by hand": lambda: by_hand(task, device, block, 1, deterministic=True),
            "by hand, fastest": lambda: by_hand(task, device, block, 1, deterministic=False),
            "by hand, 8 parts": lambda: by_hand(task, device, block, 8, deterministic=True),
        }
        for v in VIRTUAL_RANKS:
            build[f"V = {v}"] = lambda v=v: ours(task, device, block, v, group, Path(name) / str(v))  # type: ignore[misc]
        for v in (1, 8):
            make = partial(ours, task, device, block, v, group, Path(name) / f"{v} graphs", graphs=True)
            build[f"V = {v}, CUDA graphs"] = make
        arms = {arm: make() for arm, make in build.items()}
        seconds: dict[str, list[float]] = {arm: [] for arm in arms}
        for pair in range(pairs + 1):
            for arm in reversed(arms) if pair % 2 else arms:
                use_deterministic(arm != "by hand, fastest")
                device.synchronize()
                start = time.perf_counter()
                next(arms[arm])
                device.synchronize()
                seconds[arm].append((time.perf_counter() - start) / block)
        arms.clear()
        gc.collect()
    return {arm: column[1:] for arm, column in seconds.items()}  # the first pair warms up


def figures(task: Task, device: Device, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Return, by arm: milliseconds per step, the ratio to its loop by hand, units per second, and the share of peak."""
    found = {}
    for arm, column in seconds.items():
        hand = seconds["by hand, 8 parts" if arm.startswith("V = 8") else "by hand"]
        median = spread(column).median
        peak = device.peak_flops
        found[arm] = {
            "ms": spread([1e3 * each for each in column]),
            "ratio": ratio(column, hand),
            "to V = 1": ratio(column, seconds["V = 1"]),
            "per second": task.batch * task.units / median,
            "mfu": task.batch * task.flops / median / peak if peak and task.flops else None,
        }
    return found


def table(name: str, task: Task, found: dict[str, Any]) -> str:
    lines = [
        f"| {name}, batch {task.batch}, {task.precision} | ms per step | to the loop by hand | to V = 1 | "
        f"{task.unit}/s | MFU |",
        "|---|---|---|---|---|---|",
    ]
    for arm, row in found.items():
        mfu = "" if row["mfu"] is None else f"{100 * row['mfu']:.1f} %"
        lines.append(
            f"| {arm} | {row['ms']:.3f} | {row['ratio']:.3f} | {row['to V = 1'].median:.3f} | "
            f"{row['per second']:,.0f} | {mfu} |"
        )
    return "\n".join(lines)


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--model", choices=["GPT", "ResNet-50", "MLP"], help="one model")
    flags.add_argument("--pairs", type=int, default=5, help="rounds over all arms (5)")
    args = flags.parse_args()
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # for ten loops of different sizes
    device = measured_device()
    chosen = {n: t for n, t in tasks(small=device.dry).items() if args.model in (None, n)}
    found = {}
    for name, task in chosen.items():
        block = 2 if device.dry else 200 if name == "MLP" else 5
        found[name] = figures(task, device, measure(task, device, pairs=2 if device.dry else args.pairs, block=block))
    show(
        "gpu.steps",
        {"device": device.name, **found},
        lambda: "\n\n".join(table(name, chosen[name], rows) for name, rows in found.items()),
        as_json=args.json,
    )


if __name__ == "__main__":
    main()
