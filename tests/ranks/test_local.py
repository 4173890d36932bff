"""Sites that train by themselves: local SGD, post-local SGD, DiLoCo, beside the same by hand in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks.loops import attempt
from unisono.env import World
from unisono.score.order import Order
from unisono.settings import LocalSettings, Settings
from unisono.testing import run_ranks
from unisono.train.run import Run

LENGTH, WIDTH = 96, 6


def points() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(8)
    x = torch.randn(LENGTH, WIDTH, generator=g)
    return x, (x @ torch.randn(WIDTH, 3, generator=g)).tanh()


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 30), nn.Tanh(), nn.Linear(30, 3))


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(x) - y).square().sum()
    return loss


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def settings(steps: int = 13, **local: Any) -> Settings:
    return Settings(
        steps=steps, batch=24, virtual_ranks=12, seed=4, exchange="local", local=LocalSettings(**{"every": 4, **local})
    )


def train(
    run: Run[Settings], *, at: Callable[[Run[Settings], Any, nn.Module], Any] | None = None, build: Any = build
) -> dict[str, Any]:
    model = run.place(build)
    optimizer = adamw(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    run.track(model=model, optimizer=optimizer, schedule=schedule)
    begun = [p.tolist() for p in model.parameters()]
    losses, told = [], []
    for step in run.steps(torch.utils.data.TensorDataset(*points())):
        for x, y in step:
            step.backward(loss_of(model, x, y), weight=len(y))
        step.update(optimizer, schedule)
        losses.append(step.loss)
        if at is not None:
            told.append(at(run, step, model))
    run.finish()
    return {
        "begun": begun,
        "weights": [p.tolist() for p in model.parameters()],
        "losses": losses,
        "told": told,
        "result": run.result(),
    }


def by_hand(begun: list[Any], asked: Settings) -> list[torch.Tensor]:
    """The same sites one after the other in plain torch, step by step. What is left at the end: their mean."""
    local, order = (
        asked.local,
        Order(length=LENGTH, batch=asked.batch, virtual_ranks=asked.virtual_ranks, seed=asked.seed),
    )
    x, y = points()
    models = [build() for _ in range(local.sites)]
    for model in models:
        for p, b in zip(model.parameters(), begun, strict=True):
            p.data.copy_(torch.tensor(b))
    inner = [adamw(model) for model in models]
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30) for optimizer in inner]
    anchor = [nn.Parameter(torch.tensor(b)) for b in begun]
    outer = torch.optim.SGD(anchor, lr=local.lr, momentum=local.momentum, nesterov=True)
    if local.outer == "average":
        outer = torch.optim.SGD(anchor, lr=1.0)
    share = asked.virtual_ranks // local.sites
    for number in range(asked.steps or 0):
        parts = [
            [i for v in range(s * share, (s + 1) * share) for part in order.micro_batches(number, v) for i in part]
            for s in range(local.sites)
        ]
        if number < local.begin:
            parts = [sum(parts, [])] * local.sites
        for model, optimizer, schedule, samples in zip(models, inner, schedules, parts, strict=True):
            optimizer.zero_grad()
            (loss_of(model, x[samples], y[samples]) / len(samples)).backward()
            optimizer.step()
            schedule.step()
        done = number + 1
        if done == local.begin:
            for a, p in zip(anchor, models[0].parameters(), strict=True):
                a.data.copy_(p.detach())
        if done > local.begin and (done - local.begin) % local.every == 0:
            for a, *ps in zip(anchor, *[model.parameters() for model in models], strict=True):
                a.grad = sum(((a - p).detach() for p in ps), torch.zeros_like(a)) / local.sites
            outer.step()
            for a, *ps in zip(anchor, *[model.parameters() for model in models], strict=True):
                for p in ps:
                    p.data.copy_(a.detach())
    return [torch.stack([p.detach() for p in ps]).mean(0) for ps in zip(*[m.parameters() for m in models], strict=True)]


def trained(world: World, folder: Path, asked: Settings) -> Any:
    return attempt(world, folder, train, asked)


@pytest.mark.parametrize(
    "asked",
    [
        settings(outer="average"),
        settings(),
        settings(begin=5, lr=0.5, momentum=0.8),
        settings(sites=3, every=3),
        settings(every=1, outer="average"),
    ],
    ids=["average", "nesterov", "post-local", "three sites", "every step"],
)
def test_the_outer_step_is_that_of_a_loop_by_hand(asked: Settings, tmp_path: Path) -> None:
    ranks = run_ranks(trained, asked.local.sites, tmp_path, asked)
    expected = by_hand(ranks[0]["begun"], asked)
    for rank in ranks:
        for ours, theirs in zip(rank["weights"], expected, strict=True):
            torch.testing.assert_close(torch.tensor(ours), theirs, rtol=1e-5, atol=1e-6)
    assert len({rank["result"]["weights_sha256"] for rank in ranks}) == 1
    assert len({rank["result"]["loss"] for rank in ranks}) == 1
    assert ranks[0]["result"]["promise"] == "sites are part of the mathematics"


def test_the_processes_of_a_site_change_no_bit(tmp_path: Path) -> None:
    for number, asked in enumerate([settings(), settings(bits=4, fragments=2, overlap=1, begin=2)]):
        found = [
            (rank["result"]["weights_sha256"], rank["losses"])
            for size in (2, 4, 6)
            for site in [run_ranks(trained, size, tmp_path / f"{number}-{size}", asked)]
            for rank in (site[0], site[-1])
        ]
        assert len({weights for weights, _ in found}) == 1
        first, last = [losses for _, losses in found[::2]], [losses for _, losses in found[1::2]]
        assert first == [first[0]] * 3
        assert last == [last[0]] * 3
        assert first[0][5] != last[0][5]  # each site has its own
