"""A small training loop with replaceable parts, run on this rank to its end or error."""

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
from unisono.testing import build_run, close_run, run_ranks
from unisono.train.run import Run
from unisono.train.step import Step

Loop = Callable[[Run[Any]], Any]

SETTINGS = Settings(steps=3, batch=8, virtual_ranks=4, seed=2)
"""With 20 numbers, three steps are an epoch, and the last one has half a batch."""


class Numbers(torch.utils.data.Dataset):
    """Samples (features of a number, the number)."""

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
    """Call step.backward with the loss of a micro-batch: the default body."""
    step.backward(loss_of(model, x), weight=len(i))


def update(step: Step, optimizer: Any) -> None:
    """Call step.update: the default end of a step."""
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
    """Train, and return the result of `after` (or else the loss) of each step, and the fingerprint of the weights."""
    model = run.place(build)
    optimizer = make(model)
    run.track(model=model, optimizer=optimizer)
    results: list[Any] = []
    for step in run.steps(Numbers() if data is None else data):
        for x, i in step:
            body(step, model, x, i)
        result = after(step, optimizer)
        results.append(step.loss if result is None else result)
    return [*results, run.context.state.fingerprint()]


def attempt(
    world: World,
    folder: Path,
    loop: Loop,
    settings: Settings = SETTINGS,
    *,
    resume: bool = False,
    verified: bool = False,
) -> Any:
    """Return the result of `loop(run)` on this process, or the text of its exception.

    Each call has its own process group and run directory, so one process can make several calls.
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


def results_on_sizes(function: Callable[..., dict[str, Any]], folder: Path, *args: Any) -> list[dict[str, Any]]:
    """Return the results of function(world, folder, *args) on all processes of runs on 1, 2 and 3 processes."""
    return [result for size in (1, 2, 3) for result in run_ranks(function, size, str(folder / str(size)), *args)]


def assert_same_results(runs: list[dict[str, Any]], name: str) -> None:
    """Check that all processes of all runs have the same result of this name, and that it is not an error."""
    results = [run[name] for run in runs]
    assert isinstance(results[0], list), results[0]
    assert all(result == results[0] for result in results[1:])
