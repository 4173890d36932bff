"""Optimizers step shards as they step whole parameters, or promise less."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.ranks.loops import SETTINGS, attempt, train
from unisono.config import ParallelSettings, Settings
from unisono.distributed.init import join_process_group as join
from unisono.environment import World
from unisono.errors import LoopError
from unisono.testing import build_run, close_run, run_promise, run_ranks


class Signs(torch.optim.Optimizer):
    """Step by the sign of each gradient; its code does not show that it is elementwise."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad.sign(), alpha=-0.01)


class DeclaredSigns(Signs):
    by_element = True


class RenamedAdamW(torch.optim.AdamW):
    """An optimizer of torch under another name."""


class OnDTensors(torch.optim.Rprop):
    """An optimizer that steps on DTensors, with an operator that torch does not support there."""

    by_element = True


def matrix() -> nn.Module:
    return nn.Linear(3, 4, bias=False)


MAKE = {
    "Signs": Signs,
    "SureSigns": DeclaredSigns,
    "Mine": RenamedAdamW,
    "Muon": torch.optim.Muon,
    "Rprop": torch.optim.Rprop,
    "Adafactor": torch.optim.Adafactor,
    "OnDTensors": OnDTensors,
}


def all_of_them(world: World, folder: Path) -> dict[str, Any]:
    """Return for each optimizer, by name, its result with shards: bits and promise, or an error message."""

    def loop(make: Any) -> Any:
        return lambda run: (train(run, build=matrix, make=lambda model: make(model.parameters())), run_promise(run))

    config = replace(SETTINGS, parallel=ParallelSettings(shard=world.size))
    return {name: attempt(world, folder / name, loop(make), config) for name, make in MAKE.items()}


def test_optimizers_that_are_not_elementwise_promise_less_in_shards(tmp_path: Path) -> None:
    (truth,) = run_ranks(all_of_them, 1, tmp_path / "1")
    assert all(came[1][0] == "exact" for came in truth.values())
    for told in run_ranks(all_of_them, 2, tmp_path / "2"):
        for name in ("SureSigns", "Mine", "Rprop"):
            assert told[name] == truth[name], name
        assert told["Signs"][0] == truth["Signs"][0]
        for name in ("Signs", "Muon", "Adafactor"):
            assert told[name][1][0] == "tolerance", name
            assert told[name][1][1].startswith(f"{name} may compute with whole tensors"), name
        assert "cannot step OnDTensors with parameters of which each process has a part" in told["OnDTensors"]
        assert "use AdamW or SGD" in told["OnDTensors"]


def begun_or_resumed(world: World, folder: str, config: Settings, resume: bool) -> str:
    """Train with Adafactor for two steps, or resume and continue; return the error message."""
    with join(world, divided=world.size > 1) as group:
        run = build_run(config, world, group, Path(folder), resume=resume)
        model = run.place(lambda: nn.Linear(5, 3))
        optimizer = torch.optim.Adafactor(model.parameters(), lr=0.05)
        run.track(model=model, optimizer=optimizer)
        data = torch.randn(24, 5, generator=torch.Generator().manual_seed(1))
        try:
            for step in run.steps(torch.utils.data.TensorDataset(data)):
                step.run(model, lambda out, x: (out.square().sum(), len(x)))
                step.update(optimizer)
        except LoopError as error:
            return str(error)
        close_run(run)
        return ""


def test_a_resume_of_adafactor_in_shards_is_refused(tmp_path: Path) -> None:
    """Found by tests/scripts, seed 921: its row variance is saved whole, and torch failed an assertion."""
    config = Settings(steps=2, batch=8, virtual_ranks=2)
    assert run_ranks(begun_or_resumed, 1, str(tmp_path), config, False) == [""]
    config = replace(config, steps=4, parallel=ParallelSettings(shard=2))
    for says in run_ranks(begun_or_resumed, 2, str(tmp_path), config, True):
        assert "step Adafactor with parameters of which each process has a part" in says
        assert "parallel.shard=1" in says
