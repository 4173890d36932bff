"""A run that restarts after a death has the shards of all processes again, including the dead ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.ranks.elastic import ElasticProcesses, die_at
from tests.ranks.training import MLP, Points, settings
from unisono import Run
from unisono.checkpoint import emergency_dump
from unisono.config import ParallelSettings, Settings
from unisono.distributed.init import join_process_group as join
from unisono.environment import World
from unisono.errors import UnisonoError
from unisono.testing import build_run, close_run, finish_run, run_ranks


def work(world: World, config: Settings, folder: Path, dead: set[int]) -> Any:
    """Return the fingerprint and the step at which the run continued; None if it failed because others have died."""
    try:
        with join(world) as group:
            if world.number in dead:
                die_at("update", 5)
            run = build_run(config, world, group, folder)
            try:
                train(run)
            except Exception as error:
                for failed in run.context.hooks.ended:
                    failed(error)
                raise
            finally:
                close_run(run)
            return run.context.state.fingerprint(), run.context.progress.resumed_at
    except (UnisonoError, RuntimeError):
        return None


def train(run: Run[Any]) -> None:
    model = run.place(MLP)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(Points(101)):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y, reduction="sum"), weight=len(y))
        step.update(optimizer)
    finish_run(run)


@pytest.mark.slow
@pytest.mark.parametrize(("dead", "step"), [({1}, 3), ({0, 1}, 0)], ids=["one", "neighbors"])
def test_a_run_that_begins_again_loses_no_step(tmp_path: Path, dead: set[int], step: int) -> None:
    ((state, _),) = run_ranks(work, 1, settings(), tmp_path / "alone", set())
    config = settings(parallel=ParallelSettings(shard=3, replicate_shards=True))
    with ElasticProcesses(work, 3, config, tmp_path / "run", dead) as processes:
        processes.killed |= dead
        assert set(processes.results().values()) == {None}
    assert emergency_dump.dumped_steps(tmp_path / "run") >= step
    with ElasticProcesses(work, 3, config, tmp_path / "run", set()) as processes:
        found = set(processes.results().values())
    ((again, resumed_at),) = found
    assert again == state
    assert resumed_at >= step if step else resumed_at == 0
    assert not (tmp_path / "run" / emergency_dump.FOLDER).exists()
