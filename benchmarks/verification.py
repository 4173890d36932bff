"""Measure the cost of verification (docs/guide/verification.md), as a share of a run of 1,000 steps.

    python -m benchmarks.verification            about four minutes
    python -m benchmarks.verification --quick    a smoke test

Runs of a small GPT with and without the check alternate. Ten steps are timed: steps 0, 1, 2, 4 and 8 are checked, and
none of the next 990, because promise.min_interval is 120 seconds and the run takes 30. The share is the additional time
of ten steps with checks over the time of 1,000 steps without. A step takes about 30 ms.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.machine import parser, show, spread
from benchmarks.tasks import loss_of, text
from unisono.config import ParallelSettings, PromiseSettings, Settings
from unisono.distributed.init import join_process_group as join
from unisono.environment import World
from unisono.testing import build_run, close_run, run_ranks

STEPS = 10
RUN = 1000
"""Steps of the run that shares refer to."""

SCENES: dict[str, tuple[int, int, ParallelSettings]] = {
    "one process": (1, 64, ParallelSettings()),
    "two processes": (2, 96, ParallelSettings()),
    "two shards, gathered by layer": (2, 32, ParallelSettings(shard=2)),
    "two shards, gathered once a step": (2, 64, ParallelSettings(shard=2, reshard="step")),
}
"""Number of processes, width of the model (for steps of about 30 ms), and parallel layout."""


def train(world: World, settings: Settings, width: int, folder: str) -> list[float]:
    """Return the seconds of each step."""
    from unisono.recipes.text import GPT, Model

    torch.manual_seed(1)
    seconds: list[float] = []
    with join(world) as group:
        run = build_run(settings, world, group, Path(folder), verified=True)
        model = run.place(lambda: GPT(Model(width=width, depth=2, heads=4, context=128)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        run.track(model=model, optimizer=optimizer)
        start = time.perf_counter()
        for step in run.steps(text(256)):
            for x, y in step:
                step.backward(loss_of(model(x), y), weight=y.numel())
            step.update(optimizer)
            if group.size > 1:
                group.barrier()
            seconds.append(time.perf_counter() - start)
            start = time.perf_counter()
        close_run(run)
    return seconds


def measure(pairs: int) -> dict[str, Any]:
    found: dict[str, Any] = {"pairs": pairs}
    for name, (size, width, parallel) in SCENES.items():
        seconds: dict[bool, list[list[float]]] = {False: [], True: []}
        for pair in range(pairs):
            for check in (False, True) if pair % 2 else (True, False):
                settings = Settings(steps=STEPS, batch=8, virtual_ranks=8, parallel=parallel)
                settings = replace(settings, promise=PromiseSettings(check=check))
                with tempfile.TemporaryDirectory() as folder:
                    ranks = run_ranks(train, size, settings, width, folder, seconds=550)
                seconds[check].append([max(step) for step in zip(*ranks, strict=True)])
        step = median(s for steps in seconds[False] for s in steps[1:])
        more = [sum(a) - sum(b) for a, b in zip(seconds[True], seconds[False], strict=True)]
        found[name] = {
            "step_ms": 1e3 * step,
            "more_ms": spread([1e3 * each for each in more]),
            "share_percent": spread([100 * each / (RUN * step) for each in more]),
        }
    return found


def table(found: dict[str, Any]) -> str:
    lines = [f"{'':34} {'per step':>8}  {'more in ten steps':26} of {RUN} steps, in %"]
    for name in SCENES:
        step_ms, more, share = (found[name][key] for key in ("step_ms", "more_ms", "share_percent"))
        lines.append(f"{name:34} {step_ms:5.1f} ms  {f'{more:.1f} ms':26} {share:.2f}")
    return "\n".join(lines)


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--pairs", type=int, default=15, help="pairs of runs in each scene (15)")
    args = flags.parse_args()
    found = measure(2 if args.quick else args.pairs)
    show("verification", found, lambda: table(found), as_json=args.json)


if __name__ == "__main__":
    main()
