"""Deaths that the back end does not report, as with NCCL (nccl_like.py), in Unisono's and the script's collectives."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.ranks.elastic import ElasticProcesses
from tests.ranks.test_step_recovery import right
from tests.ranks.training import MLP, Points, settings
from unisono.config import CheckpointSettings, Settings, TreeSettings
from unisono.distributed.init import join_process_group as join
from unisono.distributed.membership import membership, regroup_timeout
from unisono.distributed.membership.waiting import NcclWork
from unisono.distributed.rendezvous import connect
from unisono.environment import World
from unisono.exchange.tree.tree_allreduce import TreeAllReduce
from unisono.testing import build_run, close_run, finish_run, run_ranks


def dies_at(owner: Any, name: str, times: int, *, after: bool = False, once: Callable[[], bool] = lambda: True) -> None:
    """Kill this process at (or after) a given call of a function, counted from when `once` is true."""
    real, left = getattr(owner, name), times

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= once()
        if left == 0 and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        found = real(*args, **kwargs)
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(owner, name, call)


# -- in a backward pass


class Deep(nn.Sequential):
    """A model of many buckets, which are sent during the backward pass."""

    def __init__(self) -> None:
        between = (layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU()))
        super().__init__(nn.Linear(12, 64), nn.GELU(), *between, nn.Linear(64, 5))


def looks_at_its_loss(world: World, config: Settings, folder: Path, deaths: dict[int, int]) -> str:
    config = replace(config, tree=TreeSettings(bucket_mb=(64 * 64 * 4 + 1000) / 2**20))
    if world.number in deaths:
        dies_at(TreeAllReduce, "send", deaths[world.number])
    with join(world) as group:
        run = build_run(config, world, group, folder)
        model = run.place(Deep)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(Points(101)):
            for x, y in step:
                loss = F.cross_entropy(model(x), y, reduction="sum")
                step.backward(loss, weight=len(y))
                assert loss.item() > 0  # as a script would: a device would wait here for a dead peer
            step.update(optimizer)
        finish_run(run)
        close_run(run)
        return run.context.state.fingerprint()


@pytest.mark.parametrize("times", [12, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4, 5, 6, 7))])
def test_a_loss_can_be_read_after_a_death(tmp_path: Path, times: int) -> None:
    alone = run_ranks(looks_at_its_loss, 1, settings(), tmp_path / "alone", {})[0]
    with ElasticProcesses(looks_at_its_loss, 3, settings(), tmp_path / "run", {1: times}, nccl_like=True) as processes:
        processes.killed = {1}
        assert processes.results() == {0: alone, 2: alone}


# -- at any moment


ARMED: list[bool] = []
MOMENTS: dict[str, tuple[Any, str, bool, int]] = {
    "a collective begins": (membership.Membership, "wrap", False, 300),
    "it is waited for": (NcclWork, "wait", False, 300),
    "it is over": (NcclWork, "wait", True, 300),
    "they count each other": (connect, "count_arrivals", False, 12),
    "they have": (connect, "count_arrivals", True, 12),
    "it leaves": (membership.Membership, "_leave_group", False, 6),
    "it has left": (membership.Membership, "_leave_group", True, 6),
}


def does_everything(world: World, config: Settings, folder: Path, deaths: dict[int, tuple[str, int]]) -> Any:
    if world.number in deaths:
        moment, times = deaths[world.number]
        owner, name, after, _ = MOMENTS[moment]
        dies_at(owner, name, times, after=after, once=lambda: bool(ARMED) or world.joins)
    with join(world) as group:
        run = build_run(config, world, group, folder)
        model, other = run.place(MLP), run.place(MLP)
        first, second = torch.optim.Adam(model.parameters(), lr=0.01), torch.optim.SGD(other.parameters(), lr=0.1)
        run.track(model=model, other=other, first=first, second=second)
        points, found = Points(96), list[Any]()
        for step in run.steps(points):
            ARMED.append(True)
            for x, y in step.over(first):
                step.backward(F.cross_entropy(model(x) + other(x), y, reduction="sum"), weight=len(y))
            found.append(step.grad_norm)
            for x, y in step.over(second):
                step.backward(F.cross_entropy(model(x) - other(x), y, reduction="sum"), weight=len(y))
            step.update(first, second)
            found += [run.evaluate(model, points, right), run.predict(model, points).sum().item()]
        finish_run(run)
        close_run(run)
        return found[-3:], run.context.state.fingerprint()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_deaths_at_any_moment(tmp_path: Path, seed: int) -> None:
    """All processes but one may die, and so may their replacements."""
    chance = random.Random(seed)

    def fate() -> tuple[str, int]:
        moment = chance.choice(list(MOMENTS))
        return moment, chance.randrange(1, chance.choice([20, MOMENTS[moment][3]]))

    config = settings(steps=12, checkpoint=CheckpointSettings(every=2))
    alone = run_ranks(does_everything, 1, config, tmp_path / "alone", {})[0]
    size = chance.choice([3, 4])
    spare = chance.randrange(size)
    deaths = {n: fate() for n in range(size) if n != spare and chance.random() < 0.8}
    deaths |= {n: fate() for n in range(size, size + 4) if chance.random() < 0.6}
    with ElasticProcesses(does_everything, size, config, tmp_path / "run", deaths, nccl_like=True) as processes:
        processes.killed = set(deaths)
        for number in range(size, size + 4):
            processes.start(number, joins=True)
        found = processes.results()
    assert found[spare] == alone
    assert {value[1] for value in found.values() if value is not None} == {alone[1]}


# -- a collective of the script


def adds_up_by_itself(world: World, folder: Path) -> Any:
    regroup_timeout.DEVICE_SECONDS = 2.0
    with join(world) as group:
        run = build_run(settings(), world, group, folder)
        model = run.place(MLP)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(Points(96)):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y, reduction="sum"), weight=len(y))
            step.update(optimizer)
            if step.number == 2 and world.number == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            total = torch.ones(1)
            dist.all_reduce(total)
            total.item()


def test_a_process_that_waits_for_a_stuck_device_is_reported(tmp_path: Path) -> None:
    with ElasticProcesses(adds_up_by_itself, 3, tmp_path, nccl_like=True) as processes:
        processes.killed = {1}
        why = processes.await_("silent")["why"]
        processes.kill(0, 2)
        processes.results()
    assert why.startswith("hangs at ")
    assert why.endswith(" since a process was lost")
