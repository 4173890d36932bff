"""A tracked dict is restored by a resume, so that early stopping has the same bits."""

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
from unisono.errors import CheckpointError
from unisono.testing import build_run, close_run, finish_run, run_ranks, run_result

PATIENCE = 2


def measure(out: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(out, y, reduction="sum"), len(y)


def train(world: World, folder: str, shard: int = 1, stop_after: int | None = None, resume: bool = False) -> Any:
    """Evaluate after each epoch of three steps, and stop after two epochs without improvement."""
    config = training.settings(steps=60, batch=16, parallel=ParallelSettings(shard=shard))
    with join(world) as group:
        run = build_run(config, world, group, Path(folder), resume=resume)
        model = run.place(training.MLP)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.2)
        kept: dict[str, Any] = {"best": float("inf"), "bad": 0, "seen": [], "weights": None}
        run.track(model=model, optimizer=optimizer, kept=kept)
        for step in run.steps(training.Points(48)):
            if kept["bad"] == PATIENCE:
                break
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y, reduction="sum"), weight=len(y))
            step.update(optimizer)
            if step.ends_epoch:
                now = run.evaluate(model, training.tensors(48), measure)["measure"]
                kept["seen"].append(now)
                kept["bad"] = 0 if now < kept["best"] else kept["bad"] + 1
                kept["best"] = min(now, kept["best"])
                kept["weights"] = torch.full((3,), now)
            if step.number + 1 == stop_after:
                run.stop()
        finish_run(run)
        close_run(run)
        results = kept | {"weights": kept["weights"].tolist()}
        return results, run.context.progress.steps_done, run.context.state.fingerprint(), run_result(run)["promise"]


def test_early_stopping_after_any_resume(tmp_path: Path) -> None:
    (reference,) = run_ranks(train, 1, str(tmp_path / "alone"))
    kept, steps, _, promise = reference
    assert 3 * (PATIENCE + 1) < steps < 60
    assert kept["best"] == min(kept["seen"]) < kept["seen"][-1]
    assert promise == "exact"
    stops = steps - 4  # after one epoch without improvement: without the dict, the run would continue for longer
    for number, (size, shard) in enumerate([(1, 1), (3, 1), (2, 2)]):
        folder = str(tmp_path / str(number))
        run_ranks(train, 2, folder, 1, stops)
        assert run_ranks(train, size, folder, shard, None, True) == [reference] * size
        assert run_ranks(train, 2, folder, 1, None, True) == [reference] * 2, "a run that had stopped goes on"


def test_values_that_cannot_be_saved_are_refused_before_the_first_step(tmp_path: Path) -> None:
    (message,) = run_ranks(track_wrong_values, 1, str(tmp_path))
    assert "list" in message
    assert "run.track(best=kept), with kept = {...}" in message


def track_wrong_values(world: World, folder: str) -> str:
    with join(world) as group:
        run = build_run(training.settings(), world, group, Path(folder))
        with pytest.raises(CheckpointError) as caught:
            run.track(best=[1.0])
        return str(caught.value)
