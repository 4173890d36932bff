"""All arms in the same processes, turn by turn: seconds a step. Started by `python -m benchmarks.race`.

    python -m benchmarks.race.laps '{"task": "MLP 32-32-32", ...}'                      one process
    torchrun --nproc-per-node 2 -m benchmarks.race.laps '{"task": "GPT", ...}'         two

A step takes as long as its slower process. The last line that the first process prints is `laps {...}`.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.race.arms import ARMS, MODULES, Course, Laps
from benchmarks.tasks import TASKS, Points, loss_of, mlp
from unisono.distributed.init import join_process_group as join
from unisono.distributed.process_group import ProcessGroup
from unisono.environment import World

WARM_UP = 2
"""Turns that are not counted: the first allocates, DistributedDataParallel rebuilds its buckets after it."""


@dataclass(frozen=True)
class Heat:
    """One start: what is raced, on so many virtual ranks, so many turns of `steps` steps."""

    task: str
    virtual_ranks: int
    turns: int
    steps: int = 1
    start: int = 0  # which of several starts this is
    rows: bool = False  # the data as a TensorDataset, although the task is tiny


def mse(output: torch.Tensor, target: torch.Tensor, reduction: str) -> torch.Tensor:
    return F.mse_loss(output, target, reduction=reduction)


TINY: dict[str, Callable[[int], tuple[nn.Module, torch.Tensor, torch.Tensor, Callable[..., torch.Tensor]]]] = {
    "MLP 32-32-32": lambda n: (mlp(32, 32, 32), torch.randn(n, 32), torch.randn(n, 32), mse),
    "MLP 64-64-10": lambda n: (mlp(64, 64, 10), torch.randn(n, 64), torch.randint(0, 10, (n,)), loss_of),
}
TINY_BATCH = 8


def course_of(heat: Heat, rank: int, size: int, folder: Path) -> Course:
    torch.manual_seed(1)
    make = partial(Course, rank=rank, size=size, accumulate=heat.virtual_ranks // size, folder=folder)
    if heat.task in TINY:  # an epoch is a turn
        model, x, y, loss = TINY[heat.task](heat.steps * TINY_BATCH)
        data: Any = TensorDataset(x, y) if heat.rows else Points(x, y)
        return make(model=model, data=data, loss=loss, micro=TINY_BATCH // heat.virtual_ranks)
    task = TASKS[heat.task]
    data = task.data((heat.turns + WARM_UP) * task.batch)
    return make(model=task.build(), data=data, loss=loss_of, micro=task.batch // heat.virtual_ranks)


def known() -> list[str]:
    """The arms that can start here."""
    return [arm for arm in ARMS if arm not in MODULES or find_spec(MODULES[arm].partition(".")[0])]


def race(heat: Heat, group: ProcessGroup, folder: Path) -> dict[str, Any]:
    course = course_of(heat, group.rank, group.size, folder)
    names = known()
    arms: dict[str, Laps] = {name: ARMS[name](course) for name in names}
    times = torch.zeros(len(names), heat.turns + WARM_UP, dtype=torch.float64)
    last: dict[str, nn.Module] = {}
    for turn in range(heat.turns + WARM_UP):
        # nobody always comes after the same one, nor is it always the same one that is made first
        for arm in random.Random(f"{heat.start} {turn}").sample(range(len(names)), len(names)):
            gc.collect()  # nobody cleans up for another
            group.barrier()
            began = time.perf_counter()
            for _ in range(heat.steps):
                last[names[arm]] = next(arms[names[arm]])
            times[arm, turn] = (time.perf_counter() - began) / heat.steps
    group.max_(times)
    weights = {name: nn.utils.parameters_to_vector(model.parameters()).detach() for name, model in last.items()}
    norm = weights["by hand"].norm()
    apart = {name: float((w - weights["by hand"]).norm() / norm) for name, w in weights.items()}
    moved = float((weights["by hand"] - nn.utils.parameters_to_vector(course.model.parameters())).norm() / norm)
    return {
        "heat": asdict(heat),
        "params": len(weights["by hand"]),
        "seconds": {name: row[WARM_UP:].tolist() for name, row in zip(names, times, strict=True)},
        "apart": apart,
        "moved": moved,
    }


def main() -> None:
    torch.set_num_threads(1)
    heat = Heat(**json.loads(sys.argv[1]))
    with tempfile.TemporaryDirectory() as folder, join(World.current()) as group:
        found = race(heat, group, Path(folder))
        if group.rank == 0:
            print("laps", json.dumps(found), flush=True)
        group.barrier()
    os._exit(0)  # the loops that others own are still in the middle


if __name__ == "__main__":
    main()
