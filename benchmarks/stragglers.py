"""Compare load balancing and work stealing with DistributedDataParallel when processes are slow.

    python -m benchmarks.stragglers            about ten minutes
    python -m benchmarks.stragglers --quick    a smoke test

There are three scenes, in which loops alternate (see turns.py):

    one slow      two processes; the second always takes three times as long. V = 16
    random slow   four processes; in each step a random one takes three times as long. V = 32. They wait for a simulated
                  device of 4 ms forward and 8 ms backward instead of computing, because two cores cannot run four
    nobody slow   two processes; balance.by_speed and balance.work_stealing on, over both off. V = 16

"difference" is the distance of the loops' final weights. Between our loops it is 0, for any assignment.
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
from benchmarks.turns import Comparison, LoopContext, LoopStep, measure, ours, table
from unisono import phases
from unisono.config import BalanceSettings

TIMES = 3.0
DEVICE_SECONDS = 0.004
"""Time of the simulated device for the forward pass of a micro-batch; backward takes twice as long."""


class Device(nn.Module):
    """A small model that waits as if for a device, without using the processor."""

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


def slow_second_rank(step: int, rank: int) -> float:
    return TIMES if rank == 1 else 1.0


def slow_random_rank(step: int, rank: int) -> float:
    return TIMES if rank == random.Random(f"lot {step}").randrange(4) else 1.0


def ddp(context: LoopContext) -> Iterator[LoopStep]:
    """Train with DistributedDataParallel. The loop reports phases, through which faults are injected."""
    model = DistributedDataParallel(copy.deepcopy(context.model), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for number, micro_batches in enumerate(context.steps()):
        phases.enter("data")
        for left, (x, y) in micro_batches:
            weight = context.order.batch * y[0].numel()
            with model.no_sync() if left else nullcontext():
                phases.enter("forward")
                loss = loss_of(model(x), y) * (context.group.size / weight)
                phases.enter("backward")
                loss.backward()
                phases.enter("data")
        phases.enter("other")
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norm = 0.0 if number else float(torch.nn.utils.get_total_norm(grads))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield LoopStep(model.module, norm)


BALANCE = {
    "even": BalanceSettings(by_speed=False),
    "by speed": BalanceSettings(by_speed=True),
    "work stealing": BalanceSettings(by_speed=True, work_stealing=True),
}


def build(context: LoopContext, loop: str) -> Iterator[LoopStep]:
    if loop == "DDP":
        return ddp(context)
    return ours(context, replace(context.settings, balance=BALANCE[loop]), context.group, loop)


SCENES = {
    "one slow": (
        Comparison("one slow", {"by speed": "DDP", "even": "DDP"}, build, 2, 24, slow_second_rank, TASKS_HERE),
        "GPT",
        16,
    ),
    "random slow": (
        Comparison(
            "random slow", {"work stealing": "DDP", "by speed": "DDP"}, build, 4, 24, slow_random_rank, TASKS_HERE
        ),
        "device",
        32,
    ),
    "nobody slow": (
        Comparison("nobody slow", {"work stealing": "even", "by speed": "even"}, build, 2, 4, None, TASKS_HERE),
        "GPT",
        16,
    ),
}


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--rounds", type=int, default=3, help="number of times that new processes are started (3)")
    flags.add_argument("--steps", type=int, default=40, help="steps of each loop in a round (40)")
    flags.add_argument("--scene", choices=list(SCENES), help="only this scene")
    args = flags.parse_args()
    rounds, steps = (1, 2) if args.quick else (args.rounds, args.steps)
    rows: list[dict[str, Any]] = []
    lines: list[str] = []
    for scene in [args.scene] if args.scene else SCENES:
        comparison, task, virtual_ranks = SCENES[scene]
        rows.append({"scene": scene} | measure(comparison, task, virtual_ranks, rounds, steps))
        lines += [scene, table(comparison, rows[-1:]), f"  difference: {rows[-1]['difference']}"]
        print("\n".join(lines[-3:]), file=sys.stderr, flush=True)
    show("stragglers", {"rows": rows}, lambda: "\n".join(lines), as_json=args.json)


if __name__ == "__main__":
    main()
