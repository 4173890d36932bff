"""A small loop in which one thing can be different, run on this rank until it is over or breaks."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from unisono.config import Settings
from unisono.distributed.init import join_process_group as join
from unisono.environment import World
from unisono.testing import build_run, close_run
from unisono.train.run import Run
from unisono.train.step import Step

Loop = Callable[[Run[Any]], Any]

SETTINGS = Settings(steps=3, batch=8, virtual_ranks=4, seed=2)
"""Over 20 numbers: three steps are an epoch, and the last of them has half a batch."""


class Numbers(torch.utils.data.Dataset):
    """Features of a number, and the number."""

    def __init__(self, length: int = 20) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        if i >= self.length:
            raise IndexError(i)
        return torch.tensor([i / 20, 1.0, (i % 3) - 1.0]), i


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def linear() -> nn.Module:
    return nn.Linear(3, 2)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(x) - x.sum(1, keepdim=True)).pow(2).sum()
    return loss


def whole(step: Step, model: nn.Module, x: torch.Tensor, i: torch.Tensor) -> None:
    """A round as it should be."""
    step.backward(loss_of(model, x), weight=len(i))


def update(step: Step, optimizer: Any) -> None:
    """The end of a step as it should be."""
    step.update(optimizer)


def train(
    run: Run[Any],
    body: Callable[[Step, nn.Module, torch.Tensor, torch.Tensor], Any] = whole,
    after: Callable[[Step, Any], Any] = update,
    *,
    data: Any = None,
    build: Callable[[], nn.Module] = linear,
    make: Callable[[nn.Module], Any] = sgd,
) -> list[Any]:
    """The loop. Returns what `after` returned, step by step, or else the step's loss; and the weights' fingerprint."""
    model = run.place(build)
    optimizer = make(model)
    run.track(model=model, optimizer=optimizer)
    told: list[Any] = []
    for step in run.steps(Numbers() if data is None else data):
        for x, i in step:
            body(step, model, x, i)
        said = after(step, optimizer)
        told.append(step.loss if said is None else said)
    return [*told, run.context.state.fingerprint()]


def attempt(
    world: World,
    folder: Path,
    loop: Loop,
    settings: Settings = SETTINGS,
    *,
    resume: bool = False,
    verified: bool = False,
) -> Any:
    """What `loop(run)` returns here, or the error that ends it, in words, as Python tells it last.

    Each attempt has a group and a run directory of its own, so one process can make many of them, one after the other.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with join(replace(world, store=f"file://{folder}/store{'-resumed' * resume}")) as group:
            run = build_run(settings, world, group, folder, resume=resume, verified=verified)
            try:
                return loop(run)
            finally:
                close_run(run)
    except Exception as error:
        return "".join(traceback.format_exception_only(error))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
