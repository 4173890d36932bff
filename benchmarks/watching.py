"""What it costs to know where every process stands: the watch of a process (unisono/watch/stuck.py), and the launcher's
lookout.

    python -m benchmarks.watching            a minute
    python -m benchmarks.watching --quick    a smoke test

Two processes train a model whose step takes some 30 ms, in turns of 40 steps with a watch and 40 without. Counted are
the processor time of the watch's own thread and of the lookout's, by their own clocks, and what the two lines cost that
every change of phase and every step have for it; and the times of steps in turns, which say whether anything else is
there: on two cores their own noise is larger than what is looked for.
"""

from __future__ import annotations

import tempfile
import time
import timeit
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.machine import parser, ratio, show
from unisono import phases
from unisono.env import World
from unisono.launch import record
from unisono.launch.lookout import Lookout
from unisono.settings import Settings, StuckSettings
from unisono.testing import build_run, run_ranks
from unisono.watch.stuck import Watch
from unisono.world.start import group as join

STEP_SECONDS = 0.03
"""What a part of a step is given of: the target is 1 % of it."""


def turns(world: World, blocks: int, steps: int, width: int, folder: str) -> dict[str, Any]:
    """Seconds of each step with a watch and without, and what part of a core the watch uses while it lives."""
    record.write_to(Path(folder) / f"rank-{world.rank}.json")
    config = Settings(steps=2 * blocks * steps + steps, batch=64, virtual_ranks=2)
    data = torch.utils.data.TensorDataset(torch.randn(4096, width), torch.randint(0, 10, (4096,)))
    found: dict[str, list[float]] = {"with": [], "without": []}
    used = lived = 0.0
    with join(world) as group:
        run = build_run(config, world, group, Path(folder) / "run")
        layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(6)]
        model = run.place(lambda: nn.Sequential(*layers, nn.Linear(width, 10)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        run.track(model=model, optimizer=optimizer)
        watch, clock, began = Watch(StuckSettings(), world), 0, 0.0
        for step in run.steps(data):
            block, place = divmod(step.number - steps, steps)
            if place == 0 and block % 2 == 0:
                watch, began = Watch(StuckSettings(), world), time.perf_counter()
                watch.__enter__()
                assert watch._thread is not None
                assert watch._thread.ident is not None
                clock = time.pthread_getcpuclockid(watch._thread.ident)
            elif place == 0 and block > 0:
                used += time.clock_gettime(clock)
                lived += time.perf_counter() - began
                watch.__exit__()
            start = time.perf_counter()
            step.run(model, loss)
            step.update(optimizer)
            if block >= 0:
                found["with" if block % 2 == 0 else "without"].append(time.perf_counter() - start)
        run.close()
    return {**found, "share": used / lived}


def loss(output: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, int]:
    return nn.functional.cross_entropy(output, y, reduction="sum"), len(y)


def measure(blocks: int, steps: int, width: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, Lookout(Path(folder)) as lookout:
        assert lookout._thread.ident is not None
        began, clock = time.perf_counter(), time.pthread_getcpuclockid(lookout._thread.ident)
        before = time.clock_gettime(clock)
        found = run_ranks(turns, 2, blocks, steps, width, folder, seconds=600)
        share = (time.clock_gettime(clock) - before) / (time.perf_counter() - began)
    line = min(timeit.repeat("Here.moves += 1", "from unisono.phases import Here", number=100_000, repeat=5)) / 100_000
    begin = min(timeit.repeat("f(3)", "from unisono.phases import begin_step as f", number=100_000, repeat=5)) / 100_000
    phases.Here.steps = 0
    return {
        "step_seconds": sorted(found[0]["without"])[len(found[0]["without"]) // 2],
        "ratio": ratio(found[0]["with"], found[0]["without"])._asdict(),
        "watch_share": max(rank["share"] for rank in found),
        "lookout_share": share,
        "counting_share": (12 * line + begin) / STEP_SECONDS,  # of phases there are some twelve in a step
    }


def table(of: dict[str, Any]) -> str:
    r = of["ratio"]
    total = of["watch_share"] + of["lookout_share"] + of["counting_share"]
    return "\n".join(
        [
            f"a step takes {of['step_seconds'] * 1e3:.1f} ms; with a watch {r['median']:.4f} of that"
            f" ({r['low']:.4f} to {r['high']:.4f})",
            f"the watch's thread     {of['watch_share']:.4%} of a core",
            f"the lookout's thread   {of['lookout_share']:.4%} of a core, for both processes, in the launcher",
            f"counting               {of['counting_share']:.4%} of a step of {STEP_SECONDS * 1e3:.0f} ms",
            f"together               {total:.4%}",
        ]
    )


def main() -> None:
    asked = parser(__doc__).parse_args()
    blocks, steps, width = (1, 5, 64) if asked.quick else (10, 40, 640)
    figures = measure(blocks, steps, width)
    show("watching", figures, lambda: table(figures), as_json=asked.json)


if __name__ == "__main__":
    main()
