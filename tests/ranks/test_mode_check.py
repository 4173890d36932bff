"""Layers in evaluation mode on one process and in training mode on another: that is told in the same step."""

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
"""Steps."""


def forgotten(model: nn.Module, rank: int) -> None:
    """if run.is_main: evaluate by hand"""
    if rank == 0:
        model.eval()


def frozen_elsewhere(model: nn.Module, rank: int) -> None:
    if rank > 0:
        model[2].eval()  # type: ignore[index]


def everywhere(model: nn.Module, rank: int) -> None:
    model[2].eval()  # type: ignore[index]


def put_back(model: nn.Module, rank: int) -> None:
    if rank == 0:
        model.eval()
        model.train()


def everywhere_until_the_rounds(model: nn.Module, rank: int) -> None:
    """As by hand: eval() after a step, train() in each round; who has no round stays as it is."""
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
                    if change is everywhere_until_the_rounds:
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
        (forgotten, "The model (MLP) is in evaluation mode on rank 0 of {size}, and in training mode elsewhere."),
        (frozen_elsewhere, "2 (Dropout) is in evaluation mode on rank{others} of {size}, and in training mode"),
    ],
)
def test_another_mode_on_one_process_is_told_in_the_same_step(
    tmp_path: Path, change: Callable[..., None], words: str, size: int, shard: int
) -> None:
    found = run_ranks(train, size, change, shard, str(tmp_path))
    assert found == [found[0]] * size
    said, steps = found[0]
    assert steps == CHANGE_AFTER
    assert words.format(size=size, others="s 1, 2" if size == 3 else " 1") in said


@pytest.mark.parametrize("change", [everywhere, put_back, everywhere_until_the_rounds])
def test_the_same_modes_everywhere_are_the_scripts_to_choose(tmp_path: Path, change: Callable[..., None]) -> None:
    """Of three samples in an epoch's only step half of the processes get none."""
    length = 3 if change is everywhere_until_the_rounds else 101
    assert run_ranks(train, 6, change, 1, str(tmp_path), length) == [("", 4)] * 6
