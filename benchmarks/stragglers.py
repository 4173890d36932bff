"""Slow processes: what dealing by speed and claims are worth, over DistributedDataParallel under the same slowness.

    python -m benchmarks.stragglers            about ten minutes
    python -m benchmarks.stragglers --quick    a smoke test

Three scenes, and in each the loops take turns (turns.py says how):

    one slow      two processes that compute on a core each; the second takes three times as long, always. V = 16
    random slow   four processes; in every step another one, drawn by lot, takes three times as long. V = 32. Four do
                  not fit on two cores, so their work is waiting: for a device of 4 ms forward and 8 backward
    nobody slow   two processes, dealing by speed and claims allowed, over the same with both switched off. V = 16

"apart" says how far the weights of the loops are from each other in the end: between ours and ours it is 0, whoever
computed what.
"""

from __future__ import annotations

import copy
import random
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.machine import parser, show
from benchmarks.tasks import Task, loss_of, mlp, text
from benchmarks.turns import Course, Race, Turn, measure, ours, table
from unisono import phases
from unisono.config import BalanceSettings

TIMES = 3.0
DEVICE_SECONDS = 0.004
"""What the imagined device takes for a micro-batch, forward; and twice as much backward."""


class Device(nn.Module):
    """A small model on a device that takes its time, and no processor's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(64, 256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(DEVICE_SECONDS)
        out: torch.Tensor = self.inner(x)
        if out.requires_grad:
            out.register_hook(lambda _: time.sleep(2 * DEVICE_SECONDS))
        return out


def small_gpt() -> nn.Module:
    from unisono.recipes.text import GPT, Model

    return GPT(Model(width=128, depth=4, heads=4, context=128))


def points(length: int) -> Any:
    return torch.utils.data.TensorDataset(torch.randn(length, 64), torch.randint(0, 64, (length,)))


TASKS_HERE = {"GPT": Task(small_gpt, text, 32), "device": Task(Device, points, 64)}


def second_is_slow(step: int, rank: int) -> float:
    return TIMES if rank == 1 else 1.0


def another_is_slow(step: int, rank: int) -> float:
    return TIMES if rank == random.Random(f"lot {step}").randrange(4) else 1.0


def ddp(course: Course) -> Iterator[Turn]:
    """The loop by hand. It tells its phases, as a fault acts through them."""
    model = DistributedDataParallel(copy.deepcopy(course.model), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for number, micro_batches in enumerate(course.steps()):
        phases.enter("data")
        for left, (x, y) in micro_batches:
            weight = course.order.batch * y[0].numel()
            with model.no_sync() if left else nullcontext():
                phases.enter("forward")
                loss = loss_of(model(x), y) * (course.group.size / weight)
                phases.enter("backward")
                loss.backward()
                phases.enter("data")
        phases.enter("other")
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norm = 0.0 if number else float(torch.nn.utils.get_total_norm(grads))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield Turn(model.module, norm)


DEALS = {
    "even": BalanceSettings(by_speed=False),
    "by speed": BalanceSettings(by_speed=True),
    "claims": BalanceSettings(by_speed=True, work_stealing=True),
}


def build(course: Course, loop: str) -> Iterator[Turn]:
    if loop == "DDP":
        return ddp(course)
    return ours(course, replace(course.settings, balance=DEALS[loop]), course.group, loop)


SCENES = {
    "one slow": (
        Race("one slow", {"by speed": "DDP", "even": "DDP"}, build, 2, 24, second_is_slow, TASKS_HERE),
        "GPT",
        16,
    ),
    "random slow": (
        Race("random slow", {"claims": "DDP", "by speed": "DDP"}, build, 4, 24, another_is_slow, TASKS_HERE),
        "device",
        32,
    ),
    "nobody slow": (
        Race("nobody slow", {"claims": "even", "by speed": "even"}, build, 2, 4, None, TASKS_HERE),
        "GPT",
        16,
    ),
}


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--rounds", type=int, default=3, help="how often the processes are started anew (3)")
    flags.add_argument("--steps", type=int, default=40, help="steps of each loop in a round (40)")
    flags.add_argument("--scene", choices=list(SCENES), help="only this one")
    asked = flags.parse_args()
    rounds, steps = (1, 2) if asked.quick else (asked.rounds, asked.steps)
    rows: list[dict[str, Any]] = []
    lines: list[str] = []
    for scene in [asked.scene] if asked.scene else SCENES:
        race, task, virtual_ranks = SCENES[scene]
        rows.append({"scene": scene} | measure(race, task, virtual_ranks, rounds, steps))
        lines += [scene, table(race, rows[-1:]), f"  apart: {rows[-1]['apart']}"]
        print("\n".join(lines[-3:]), file=sys.stderr, flush=True)
    show("stragglers", {"rows": rows}, lambda: "\n".join(lines), as_json=asked.json)


if __name__ == "__main__":
    main()
