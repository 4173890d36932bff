"""Layers in eval mode on one process and in training mode on another raise an error in the same step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.ranks import training
from unisono.config import ParallelSettings
from unisono.distributed.init import join_process_group as join
from unisono.environment import World
from unisono.errors import LoopError
from unisono.testing import build_run, close_run, run_ranks

CHANGE_AFTER = 2
"""Number of steps."""


def eval_on_rank_0(model: nn.Module, rank: int) -> None:
    """Forget train() after an evaluation on rank 0."""
    if rank == 0:
        model.eval()


def eval_layer_on_one_rank(model: nn.Module, rank: int) -> None:
    if rank > 0:
        model[2].eval()  # type: ignore[index]


def eval_layer(model: nn.Module, rank: int) -> None:
    model[2].eval()  # type: ignore[index]


def restore_mode(model: nn.Module, rank: int) -> None:
    if rank == 0:
        model.eval()
        model.train()


def eval_between_steps(model: nn.Module, rank: int) -> None:
    """Call eval() after a step and train() for each micro-batch, of which some processes have none."""
    model.eval()


def train(world: World, change: Callable[[nn.Module, int], None], shard: int, folder: str, length: int = 101) -> Any:
    config = training.settings(steps=4, virtual_ranks=6, batch=12, parallel=ParallelSettings(shard=shard))
    losses = []
    with join(world) as group:
        run = build_run(config, world, group, Path(folder))
        model = run.place(training.MLP)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        run.track(model=model, optimizer=optimizer)
        try:
            for step in run.steps(training.Points(length)):
                for x, y in step:
                    if change is eval_between_steps:
                        model.train()
                    step.backward(F.cross_entropy(model(x), y, reduction="sum"), weight=len(y))
                step.update(optimizer)
                losses.append(step.loss)
                if step.number + 1 == CHANGE_AFTER:
                    change(model, world.rank)
            close_run(run)
        except LoopError as error:
            return str(error), len(losses)
        return "", len(losses)


@pytest.mark.parametrize(("size", "shard"), [(3, 1), (2, 2)])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (eval_on_rank_0, "The model (MLP) is in evaluation mode on rank 0 of {size}, and in training mode elsewhere."),
        (eval_layer_on_one_rank, "2 (Dropout) is in evaluation mode on rank{others} of {size}, and in training mode"),
    ],
)
def test_different_modes_raise_in_the_same_step(
    tmp_path: Path, change: Callable[..., None], words: str, size: int, shard: int
) -> None:
    found = run_ranks(train, size, change, shard, str(tmp_path))
    assert found == [found[0]] * size
    message, steps = found[0]
    assert steps == CHANGE_AFTER
    assert words.format(size=size, others="s 1, 2" if size == 3 else " 1") in message


@pytest.mark.parametrize("change", [eval_layer, restore_mode, eval_between_steps])
def test_equal_modes_are_allowed(tmp_path: Path, change: Callable[..., None]) -> None:
    """With three samples in the only step of an epoch, half of the processes have none."""
    length = 3 if change is eval_between_steps else 101
    assert run_ranks(train, 6, change, 1, str(tmp_path), length) == [("", 4)] * 6
