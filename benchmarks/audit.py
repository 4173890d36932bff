"""What an audit costs: one virtual rank of a step is computed again on another process, and compared.

    python -m benchmarks.audit            about a minute
    python -m benchmarks.audit --quick    a smoke test

Two processes train a GPT of 10.7 million parameters, four virtual ranks each. Audits are every second step, so steps
with one, in which a fifth virtual rank is computed, and steps without take turns: the ratio of two neighbours.
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
    """Seconds of each step."""
    task = TASKS["GPT"]
    torch.manual_seed(1)
    seconds: list[float] = []
    with join(world) as group:
        run = build_run(settings, world, group, Path(folder))
        model = run.place(task.build)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        run.track(model=model, optimizer=optimizer)
        began = time.perf_counter()
        for step in run.steps(task.data(settings.batch * 8)):
            for x, y in step:
                step.backward(loss_of(model(x), y), weight=y.numel())
            step.update(optimizer)
            group.barrier()
            seconds.append(time.perf_counter() - began)
            began = time.perf_counter()
        close_run(run)
    return seconds[WARM_UP:]


def measure(pairs: int) -> dict[str, Any]:
    never = DivergenceSettings(every=0)
    steps = EVERY * pairs + WARM_UP
    settings = Settings(steps=steps, batch=16, virtual_ranks=8, audit_every=EVERY, divergence=never)
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(train, 2, settings, folder, seconds=550)
    slower = [max(pair) for pair in zip(*found, strict=True)]  # every process waits for it
    return {"pairs": pairs, "audited": ratio(slower[1::2], slower[::2])}


def table(found: dict[str, Any]) -> str:
    return (
        f"a step with an audit (a virtual rank more than the four of each process) over one without: "
        f"{found['audited']:.3f}, {found['pairs']} times"
    )


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--pairs", type=int, default=20, help="steps of each kind (20)")
    asked = flags.parse_args()
    found = measure(2 if asked.quick else asked.pairs)
    show("audit", found, lambda: table(found), as_json=asked.json)


if __name__ == "__main__":
    main()
