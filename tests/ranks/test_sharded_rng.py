"""Noise that a script draws for gradients and weights between two steps: the same bits if they are sharded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from unisono.config import ParallelSettings, Settings
from unisono.distributed.init import join_process_group as join
from unisono.environment import World
from unisono.testing import build_run, close_run, run_promise, run_ranks

CHANGES: dict[str, Callable[[Any], Any]] = {
    "randn_like": lambda grad: grad.add_(0.1 * torch.randn_like(grad)),
    "rand_like": lambda grad: grad.mul_(torch.rand_like(grad)),
    "randint_like": lambda grad: grad.mul_(torch.randint_like(grad, 0, 3)),
    "normal_": lambda grad: grad.add_(torch.empty_like(grad).normal_(0, 0.1)),
    "uniform_": lambda grad: grad.add_(torch.empty_like(grad).uniform_(-0.1, 0.1)),
    "bernoulli_": lambda grad: grad.mul_(torch.empty_like(grad).bernoulli_(0.5)),
    "bernoulli": lambda grad: grad.mul_(torch.bernoulli(grad.abs().clamp(max=1.0))),
    "dropout": lambda grad: grad.copy_(F.dropout(grad, 0.5)),
}


def train(world: World, how: str, folder: str, config: Settings) -> tuple[str, str]:
    """Return the fingerprint of the weights, and the promise."""
    with join(world, divided=world.size > 1) as group:
        run = build_run(config, world, group, Path(folder))
        model = run.place(lambda: nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 3)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        x = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
        for step in run.steps(torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())):
            step.run(model, lambda out, _, y: (F.cross_entropy(out, y, reduction="sum"), len(y)))
            for p in model.parameters():
                CHANGES[how](p.grad)
            step.update(optimizer)
        close_run(run)
        return run.context.state.fingerprint(), run_promise(run)[0]


@pytest.mark.ci
@pytest.mark.parametrize("how", CHANGES)
def test_noise_for_a_sharded_tensor_is_that_of_a_whole_one(how: str, tmp_path: Path) -> None:
    config = Settings(steps=3, batch=8, virtual_ranks=2)
    (whole,) = run_ranks(train, 1, how, str(tmp_path / "whole"), config)
    divided = replace(config, parallel=ParallelSettings(shard=2))
    for came in run_ranks(train, 2, how, str(tmp_path / "divided"), divided):
        assert came == whole == (whole[0], "exact")
