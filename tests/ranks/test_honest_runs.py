"""Verification of correct runs: no violation, and the same bits as without it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks.loops import Loop, linear, loss_of, train
from tests.ranks.test_verification import LONGER, attempt, odd_model
from unisono.config import LoaderSettings, ParallelSettings, PromiseSettings, Settings
from unisono.environment import World
from unisono.testing import run_ranks, run_result
from unisono.train.run import Run
from unisono.train.step import Step

EVEN = replace(LONGER, batch=20)  # batch norm needs two samples


def run_all(world: World, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    cases: dict[str, tuple[Loop, Settings]] = {
        "plain": (train, LONGER),
        "unchecked": (train, replace(LONGER, promise=PromiseSettings(check=False))),
        "pieces": (train, replace(LONGER, micro_batch=1)),
        "norm": (partial(train, build=lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), four_inputs())), EVEN),
        "dropout": (partial(train, build=lambda: nn.Sequential(nn.Dropout(0.5), linear())), LONGER),
        "unused": (partial(train, build=SometimesUsed), LONGER),
        "fp16": (train, replace(LONGER, precision="fp16")),
        "worker": (train, replace(LONGER, loader=LoaderSettings(workers=1))),
        "slopes": (with_autograd_grad, LONGER),
        "growing": (partial(train, build=GrowingTable), LONGER),
        "claims": (train, replace(LONGER, balance=replace(LONGER.balance, work_stealing=world.size > 1))),
    }
    if world.size == 2:
        for gather in ("layer", "step"):
            config = replace(LONGER, parallel=ParallelSettings(shard=2, reshard=gather))
            cases[f"shards by {gather}"] = (partial(train, build=odd_model), config)
            cases[f"own optimizer by {gather}"] = (partial(train, build=odd_model, make=StepCounter), config)
            cases[f"shards in pieces by {gather}"] = (partial(train, build=odd_model), replace(config, micro_batch=1))
    for name, (loop, settings) in cases.items():
        found[name] = attempt(world, folder / name.replace(" ", "-"), partial(and_promise, loop), settings)
    return found


def with_autograd_grad(run: Run[Any]) -> Any:
    """Call torch.autograd.grad on parameters for each micro-batch."""

    def body(step: Step, model: nn.Module, x: torch.Tensor, i: torch.Tensor) -> None:
        slopes = torch.autograd.grad(loss_of(model, x), [*model.parameters()], create_graph=True)
        steep = sum(slope.square().sum() for slope in slopes)
        step.backward(loss_of(model, x) + 0.01 * steep, weight=len(i))

    return train(run, body)


class GrowingTable(nn.Module):
    """A model whose buffer grows with its input, as a table of rotary embeddings."""

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


class StepCounter(torch.optim.Optimizer):
    """An element-wise optimizer with a step counter in a tensor."""

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


def and_promise(loop: Loop, run: Run[Any]) -> Any:
    fingerprint = loop(run)[-1]
    results = run_result(run)
    return fingerprint, results["promise"], results.get("verified_steps")


def four_inputs() -> nn.Module:
    return nn.Linear(4, 2)


class SometimesUsed(nn.Module):
    """A model with a layer that only odd samples use, and an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.some, self.none = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.all(x)
        return out + self.some(x) if float(x.sum()) > 0 else out


@pytest.mark.slow
def test_correct_runs_pass_verification(tmp_path: Path) -> None:
    (one,) = run_ranks(run_all, 1, tmp_path / "1")
    for size in (2, 3):
        for result in run_ranks(run_all, size, tmp_path / str(size)):
            for name, found in result.items():
                if name in one:
                    assert found == one[name], name
                else:
                    assert found[1:] == ("exact", 5), (name, found)
    assert one.pop("unchecked") == (one["plain"][0], "exact", None)
    assert all(found[1:] == ("exact", 5) for found in one.values()), one
