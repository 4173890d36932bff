"""What it costs to look whether the processes still hold and compute the same: the divergence watch and the audit.

    python -m benchmarks.digests            about two minutes
    python -m benchmarks.digests --quick    a smoke test

Two processes train a GPT of 10.7 million parameters (43 MB), with AdamW. In every step they compare what they hold, and
what that takes is measured by itself: the number of all gradients, and, when both have come, the number of all weights
and the message. In a run it happens every thousandth step (divergence.every), so it is divided by that, and laid beside
a step of 30 ms. A comparison hears every step's loss as well, for spikes.

Audits are every second step, so steps with one and without take turns: the ratio of two neighbours.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import parser, ratio, show, spread
from benchmarks.tasks import TASKS, loss_of
from unisono.env import World
from unisono.settings import DivergenceSettings, Settings
from unisono.testing import build_run, run_ranks
from unisono.watch.spikes import Spikes
from unisono.world.start import group as join

EVERY = DivergenceSettings.every
STEP_SECONDS = 0.03
WARM_UP = 2
AUDITED = {"batch": 16, "virtual_ranks": 8, "audit_every": 2}
"""Four virtual ranks each, and one more in an audited step."""


def timed(function: Callable[..., Any], seconds: list[float], meet: Callable[[], None] | None = None) -> Any:
    """The function, which notes how long it takes; after all have met, if they must."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if meet is not None:
            meet()
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - began)

    return call


def train(world: World, settings: Settings, folder: str) -> dict[str, list[float]]:
    """Seconds of the number of all gradients, of a comparison, and of each step without these."""
    task = TASKS["GPT"]
    torch.manual_seed(1)
    seconds: dict[str, list[float]] = {"gradients": [], "weights": [], "steps": []}
    with join(world) as group:
        run = build_run(settings, world, group, Path(folder))
        model = run.place(task.build)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        run.track(model=model, optimizer=optimizer)
        steps = run.steps(task.data(settings.batch * 8))
        watch = run._engine.divergence if run._engine is not None else None
        assert watch is not None
        watch.given = timed(watch.given, seconds["gradients"])  # type: ignore[method-assign]
        watch.compare = timed(watch.compare, seconds["weights"], group.barrier)  # type: ignore[method-assign]
        began = time.perf_counter()
        for step in steps:
            for x, y in step:
                step.backward(loss_of(model(x), y), weight=y.numel())
            step.update(optimizer)
            group.barrier()
            seconds["steps"].append(time.perf_counter() - began)
            began = time.perf_counter()
        run.close()
    return {name: found[WARM_UP:] for name, found in seconds.items()}


def measure(steps: int) -> dict[str, Any]:
    each = DivergenceSettings(every=1)
    watched = Settings(steps=steps + WARM_UP, batch=2, virtual_ranks=2, divergence=each)
    never = DivergenceSettings(every=0)
    audited = Settings(steps=2 * (steps // 2) + WARM_UP, divergence=never, **AUDITED)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(train, 2, watched, f"{folder}/watched", seconds=550)
        turns = run_ranks(train, 2, audited, f"{folder}/audited", seconds=550)
    # every process waits for the slower one
    slower = {name: [max(pair) for pair in zip(found[0][name], found[1][name], strict=True)] for name in found[0]}
    both = [max(pair) for pair in zip(turns[0]["steps"], turns[1]["steps"], strict=True)]
    spikes, hears = Spikes(), 20_000
    began = time.perf_counter()
    for number in range(hears):
        spikes.hear(2.0 + number % 7)
    spike = (time.perf_counter() - began) / hears
    gradients, weights = spread(slower["gradients"]), spread(slower["weights"])
    step = (gradients.median + weights.median) / EVERY + spike
    return {
        "steps": steps,
        "gradients_ms": [1e3 * x for x in gradients],
        "weights_ms": [1e3 * x for x in weights],
        "every": EVERY,
        "spikes_us": 1e6 * spike,
        "us_a_step": 1e6 * step,
        "of_30_ms": step / STEP_SECONDS,
        "audited": ratio(both[1::2], both[::2]),
    }


def table(found: dict[str, Any]) -> str:
    low, median, high = found["weights_ms"]
    return "\n".join(
        [
            f"a comparison: gradients {found['gradients_ms'][1]:.2f} ms, weights and message {median:.2f} ms "
            f"({low:.2f} to {high:.2f}), {found['steps']} times",
            f"every {found['every']} steps, and a look for spikes ({found['spikes_us']:.1f} us): "
            f"{found['us_a_step']:.1f} us a step, {found['of_30_ms']:.3%} of 30 ms",
            f"a step with an audit (a virtual rank more than the four of each process) over one without: "
            f"{found['audited']:.3f}",
        ]
    )


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--steps", type=int, default=40, help="steps of each kind (40)")
    asked = flags.parse_args()
    found = measure(4 if asked.quick else asked.steps)
    show("digests", found, lambda: table(found), as_json=asked.json)


if __name__ == "__main__":
    main()
