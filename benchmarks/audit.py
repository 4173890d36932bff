"""Measure the cost of an audit, which computes one virtual rank of a step again on another process.

    python -m benchmarks.audit            about a minute
    python -m benchmarks.audit --quick    a smoke test

Two processes train a GPT of 10.7 million parameters, four virtual ranks each. Audits are every second step, so steps
with an audit, in which a process computes a fifth virtual rank, alternate with steps without. The figure is the ratio
of two consecutive steps.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import parser, ratio, show
from benchmarks.tasks import TASKS, loss_of
from unisono.config import DivergenceSettings, Settings
from unisono.distributed.init import join_process_group as join
from unisono.environment import World
from unisono.testing import build_run, close_run, run_ranks

WARM_UP = 2
EVERY = 2


def train(world: World, settings: Settings, folder: str) -> list[float]:
    """Return the seconds of each step."""
    task = TASKS["GPT"]
    torch.manual_seed(1)
    seconds: list[float] = []
    with join(world) as group:
        run = build_run(settings, world, group, Path(folder))
        model = run.place(task.build)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        run.track(model=model, optimizer=optimizer)
        start = time.perf_counter()
        for step in run.steps(task.data(settings.batch * 8)):
            for x, y in step:
                step.backward(loss_of(model(x), y), weight=y.numel())
            step.update(optimizer)
            group.barrier()
            seconds.append(time.perf_counter() - start)
            start = time.perf_counter()
        close_run(run)
    return seconds[WARM_UP:]


def measure(pairs: int) -> dict[str, Any]:
    no_divergence_check = DivergenceSettings(every=0)
    steps = EVERY * pairs + WARM_UP
    settings = Settings(steps=steps, batch=16, virtual_ranks=8, audit_every=EVERY, divergence=no_divergence_check)
    with tempfile.TemporaryDirectory() as folder:
        seconds = run_ranks(train, 2, settings, folder, seconds=550)
    slower = [max(pair) for pair in zip(*seconds, strict=True)]  # both processes wait for the slower one
    return {"pairs": pairs, "audited": ratio(slower[1::2], slower[::2])}


def table(found: dict[str, Any]) -> str:
    return (
        f"a step with an audit (five virtual ranks on a process instead of four) over a step without: "
        f"{found['audited']:.3f}, {found['pairs']} pairs"
    )


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--pairs", type=int, default=20, help="steps of each kind (20)")
    args = flags.parse_args()
    found = measure(2 if args.quick else args.pairs)
    show("audit", found, lambda: table(found), as_json=args.json)


if __name__ == "__main__":
    main()
