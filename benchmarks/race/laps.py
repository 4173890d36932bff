"""Measure seconds per step of all arms, which alternate in the same processes. `python -m benchmarks.race` starts it.

    python -m benchmarks.race.laps '{"task": "MLP 32-32-32", ...}'                      one process
    torchrun --nproc-per-node 2 -m benchmarks.race.laps '{"task": "GPT", ...}'         two

The time of a step is that of the slowest process. The last line that rank 0 prints is `laps {...}`.
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

from benchmarks.race.arms import ARMS, MODULES, Setup, Steps
from benchmarks.tasks import TASKS, Points, loss_of, mlp
from unisono.distributed.init import join_process_group as join
from unisono.distributed.process_group import ProcessGroup
from unisono.environment import World

WARM_UP = 2
"""Turns that do not count: the first one allocates, and DistributedDataParallel rebuilds its buckets after it."""


@dataclass(frozen=True)
class RaceSpec:
    """A task, its virtual ranks, and a number of turns of `steps` steps."""

    task: str
    virtual_ranks: int
    turns: int
    steps: int = 1
    start: int = 0  # number of this repetition
    rows: bool = False  # use a TensorDataset for a tiny task


def mse(output: torch.Tensor, target: torch.Tensor, reduction: str) -> torch.Tensor:
    return F.mse_loss(output, target, reduction=reduction)


TINY: dict[str, Callable[[int], tuple[nn.Module, torch.Tensor, torch.Tensor, Callable[..., torch.Tensor]]]] = {
    "MLP 32-32-32": lambda n: (mlp(32, 32, 32), torch.randn(n, 32), torch.randn(n, 32), mse),
    "MLP 64-64-10": lambda n: (mlp(64, 64, 10), torch.randn(n, 64), torch.randint(0, 10, (n,)), loss_of),
}
TINY_BATCH = 8


def make_setup(spec: RaceSpec, rank: int, size: int, folder: Path) -> Setup:
    torch.manual_seed(1)
    make = partial(Setup, rank=rank, size=size, accumulate=spec.virtual_ranks // size, folder=folder)
    if spec.task in TINY:  # each turn is an epoch
        model, x, y, loss = TINY[spec.task](spec.steps * TINY_BATCH)
        data: Any = TensorDataset(x, y) if spec.rows else Points(x, y)
        return make(model=model, data=data, loss=loss, micro=TINY_BATCH // spec.virtual_ranks)
    task = TASKS[spec.task]
    data = task.data((spec.turns + WARM_UP) * task.batch)
    return make(model=task.build(), data=data, loss=loss_of, micro=task.batch // spec.virtual_ranks)


def installed() -> list[str]:
    """Return the arms whose libraries are installed."""
    return [arm for arm in ARMS if arm not in MODULES or find_spec(MODULES[arm].partition(".")[0])]


def race(spec: RaceSpec, group: ProcessGroup, folder: Path) -> dict[str, Any]:
    """Alternate all arms, and return seconds per step and differences of weights."""
    setup = make_setup(spec, group.rank, group.size, folder)
    names = installed()
    arms: dict[str, Steps] = {name: ARMS[name](setup) for name in names}
    times = torch.zeros(len(names), spec.turns + WARM_UP, dtype=torch.float64)
    last: dict[str, nn.Module] = {}
    for turn in range(spec.turns + WARM_UP):
        # A random order, so that no arm always follows the same one.
        for arm in random.Random(f"{spec.start} {turn}").sample(range(len(names)), len(names)):
            gc.collect()  # no arm frees the memory of another
            group.barrier()
            start = time.perf_counter()
            for _ in range(spec.steps):
                last[names[arm]] = next(arms[names[arm]])
            times[arm, turn] = (time.perf_counter() - start) / spec.steps
    group.max_(times)
    weights = {name: nn.utils.parameters_to_vector(model.parameters()).detach() for name, model in last.items()}
    norm = weights["by hand"].norm()
    difference = {name: float((w - weights["by hand"]).norm() / norm) for name, w in weights.items()}
    distance = float((weights["by hand"] - nn.utils.parameters_to_vector(setup.model.parameters())).norm() / norm)
    return {
        "spec": asdict(spec),
        "params": len(weights["by hand"]),
        "seconds": {name: row[WARM_UP:].tolist() for name, row in zip(names, times, strict=True)},
        "difference": difference,
        "distance": distance,
    }


def main() -> None:
    torch.set_num_threads(1)
    spec = RaceSpec(**json.loads(sys.argv[1]))
    with tempfile.TemporaryDirectory() as folder, join(World.current()) as group:
        figures = race(spec, group, Path(folder))
        if group.rank == 0:
            print("laps", json.dumps(figures), flush=True)
        group.barrier()
    os._exit(0)  # do not wait for the loops of other libraries, which have not ended


if __name__ == "__main__":
    main()
