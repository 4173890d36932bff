"""Honest runs under the check of their promise: the same bits as without it, on any number of processes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.ranks.loops import Loop, linear, loss_of, train
from tests.ranks.test_verification import LONGER, attempt, odd
from unisono.config import LoaderSettings, ParallelSettings, PromiseSettings, Settings
from unisono.environment import World
from unisono.testing import run_ranks, run_result
from unisono.train.run import Run
from unisono.train.step import Step

EVEN = replace(LONGER, batch=20)  # no batch norm sees a single sample


def honest(world: World, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    cases: dict[str, tuple[Loop, Settings]] = {
        "plain": (train, LONGER),
        "unchecked": (train, replace(LONGER, promise=PromiseSettings(check=False))),
        "pieces": (train, replace(LONGER, micro_batch=1)),
        "norm": (partial(train, build=lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), linear4())), EVEN),
        "dropout": (partial(train, build=lambda: nn.Sequential(nn.Dropout(0.5), linear())), LONGER),
        "unused": (partial(train, build=Unused), LONGER),
        "fp16": (train, replace(LONGER, precision="fp16")),
        "worker": (train, replace(LONGER, loader=LoaderSettings(workers=1))),
        "slopes": (sloped, LONGER),
        "growing": (partial(train, build=Growing), LONGER),
        "claims": (train, replace(LONGER, balance=replace(LONGER.balance, work_stealing=world.size > 1))),
    }
    if world.size == 2:
        for gather in ("layer", "step"):
            config = replace(LONGER, parallel=ParallelSettings(shard=2, reshard=gather))
            cases[f"shards by {gather}"] = (partial(train, build=odd), config)
            cases[f"own optimizer by {gather}"] = (partial(train, build=odd, make=Warm), config)
            cases[f"shards in pieces by {gather}"] = (partial(train, build=odd), replace(config, micro_batch=1))
    for name, (loop, settings) in cases.items():
        found[name] = attempt(world, folder / name.replace(" ", "-"), partial(with_result, loop), settings)
    return found


def sloped(run: Run[Any]) -> Any:
    """Takes a gradient of parameters within a round."""

    def body(step: Step, model: nn.Module, x: torch.Tensor, i: torch.Tensor) -> None:
        slopes = torch.autograd.grad(loss_of(model, x), [*model.parameters()], create_graph=True)
        steep = sum(slope.square().sum() for slope in slopes)
        step.backward(loss_of(model, x) + 0.01 * steep, weight=len(i))

    return train(run, body)


class Growing(nn.Module):
    """Replaces a buffer by a longer one as it sees larger numbers, as a rotary table grows."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(3, 2)
        self.register_buffer("table", torch.zeros(1, 1), persistent=False)
        self.table: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = 1 + int(x.abs().max() * 4)
        if len(self.table) < rows:
            self.table = torch.arange(float(rows))[:, None]
        out: torch.Tensor = self.out(x) + self.table[rows - 1]
        return out


class Warm(torch.optim.Optimizer):
    """Counts its steps in a tensor of its own, and goes element by element."""

    by_element = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})
        self.count = torch.zeros(())

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    p -= 0.01 * min(1.0, float(self.count) / 20) * p.grad


def with_result(loop: Loop, run: Run[Any]) -> Any:
    fingerprint = loop(run)[-1]
    told = run_result(run)
    return fingerprint, told["promise"], told.get("verified_steps")


def linear4() -> nn.Module:
    return nn.Linear(4, 2)


class Unused(nn.Module):
    """A layer that odd samples alone use, and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.some, self.none = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.all(x)
        return out + self.some(x) if float(x.sum()) > 0 else out


def test_honest_runs_are_left_alone(tmp_path: Path) -> None:
    (one,) = run_ranks(honest, 1, tmp_path / "1")
    for size in (2, 3):
        for came in run_ranks(honest, size, tmp_path / str(size)):
            for name, found in came.items():
                if name in one:
                    assert found == one[name], name
                else:
                    assert found[1:] == ("exact", 5), (name, found)
    assert one.pop("unchecked") == (one["plain"][0], "exact", None)
    assert all(found[1:] == ("exact", 5) for found in one.values()), one
