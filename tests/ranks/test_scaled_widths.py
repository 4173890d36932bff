"""A model with maximal updates: the same bits on any number of processes, in shards, and after a resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.ranks.loops import attempt
from unisono import scaling
from unisono.config import CheckpointSettings, ParallelSettings, Settings
from unisono.environment import World
from unisono.testing import run_ranks, run_result
from unisono.train.run import Run

CONFIG = Settings(steps=4, batch=16, virtual_ranks=4, checkpoint=CheckpointSettings(every=2))


def net(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))


def loss_fn(output: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, int]:
    return F.cross_entropy(output, y, reduction="sum"), len(y)


def train(run: Run[Any]) -> tuple[Any, ...]:
    widths = scaling.WidthScaling(lambda: net(24), lambda: net(8))
    model = run.place(lambda: widths.apply_init(net(24)))
    optimizer = torch.optim.AdamW(widths.groups(model, lr=0.03, weight_decay=0.1))
    schedule = scaling.warmup_cosine(optimizer, warmup=2, total=4)
    run.track(model=model, optimizer=optimizer, schedule=schedule)
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    for step in run.steps(TensorDataset(x, (x[:, 0] > 0).long())):
        step.run(model, loss_fn)
        step.update(optimizer, schedule)
    found = run_result(run)
    rates = [(group["lr"], group["weight_decay"], len(group["params"])) for group in optimizer.param_groups]
    return found["weights_sha256"], found["loss"], found["promise"], rates, schedule.get_last_lr()


def trained(world: World, folder: str, config: Settings, resume: bool = False) -> Any:
    return attempt(world, Path(folder), train, config, resume=resume)


def test_any_number_of_processes_shards_and_a_resume(tmp_path: Path) -> None:
    (one,) = run_ranks(trained, 1, str(tmp_path / "1"), CONFIG)
    assert isinstance(one, tuple), one
    assert one[2] == "exact"
    assert [(decay, count) for _, decay, count in one[3]] == [(0.1, 5), (0.1 * 3, 1)]
    for size, config in ((2, CONFIG), (3, CONFIG), (2, replace(CONFIG, parallel=ParallelSettings(shard=2)))):
        assert run_ranks(trained, size, str(tmp_path / f"{size}-{config.parallel.shard}"), config) == [one] * size
    run_ranks(trained, 1, str(tmp_path / "half"), replace(CONFIG, steps=2))
    assert run_ranks(trained, 2, str(tmp_path / "half"), CONFIG, True) == [one] * 2
