"""An average of sharded weights, placed like the model, as in docs/guide/buffers.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.ranks import training
from unisono.config import ParallelSettings
from unisono.distributed.init import join_process_group as join
from unisono.environment import World
from unisono.testing import build_run, close_run, run_ranks


def train(world: World, folder: str, parallel: ParallelSettings) -> tuple[list[float], str]:
    config = training.settings(parallel=parallel)
    losses = []
    with join(world) as group:
        run = build_run(config, world, group, Path(folder))
        model = run.place(training.MLP)
        average = run.place(lambda: training.MLP().requires_grad_(False))
        average.load_state_dict(model.state_dict())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        run.track(model=model, average=average, optimizer=optimizer)
        for step in run.steps(training.Points(101)):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y, reduction="sum"), weight=len(y))
            step.update(optimizer)
            with torch.no_grad():
                for a, p in zip(average.parameters(), model.parameters(), strict=True):
                    a.lerp_(p, 0.1)
            losses.append(run.evaluate(average, training.tensors(20), measure)["measure"])
        close_run(run)
        return losses, run.context.state.fingerprint()


def measure(out: torch.Tensor, _: Any, y: torch.Tensor) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(out, y, reduction="sum"), len(y)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("size", "parallel"),
    [
        (3, ParallelSettings()),
        (2, ParallelSettings(shard=2)),
        (2, ParallelSettings(shard=2, reshard="step")),
        (4, ParallelSettings(shard=2, offload=True)),
    ],
)
def test_average_is_bit_identical(tmp_path: Path, size: int, parallel: ParallelSettings) -> None:
    (reference,) = run_ranks(train, 1, str(tmp_path / "alone"), ParallelSettings())
    assert len(set(reference[0])) == len(reference[0])
    assert run_ranks(train, size, str(tmp_path / "divided"), parallel) == [reference] * size
