"""Processes die at any moment, others join, and the result is that of an undisturbed run."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.ranks.elastic import ElasticProcesses, die_at
from tests.ranks.training import MLP, Points, loop, settings, train
from unisono import phases
from unisono.checkpoint.load import newest
from unisono.config import BalanceSettings, CheckpointSettings, LoaderSettings, Settings
from unisono.distributed.init import join_process_group as join
from unisono.distributed.membership.membership import membership_of
from unisono.environment import World
from unisono.testing import build_run, close_run, finish_run, run_ranks, run_result


def work(world: World, config: Settings, folder: Path, deaths: dict[int, tuple[str, int]], kind: str = "mlp") -> Any:
    with join(world, divided=config.parallel.shard != 1) as group:
        assert world.number is not None
        if world.number in deaths:
            die_at(*deaths[world.number])
        run = build_run(config, world, group, folder, verified=True)
        out = loop(run, kind, 101, {}, None, config.parallel.shard == 1)  # noise on shards differs between processes
        finish_run(run)
        close_run(run)
        result = run_result(run)
        return out["losses"], run.context.state.fingerprint(), result


def undisturbed(folder: Path, kind: str = "mlp", *, noise: bool = True, **changes: Any) -> Any:
    (alone,) = run_ranks(train, 1, kind, settings(**changes), str(folder / "alone"), 101, False, None, None, noise)
    return alone["losses"], alone["state"]


QUICK = [("backward", 10), ("exchange", 3), ("update", 3)]
SLOW = [("forward", 9), ("data", 8), ("other", 13)]


BACK_ENDS = pytest.mark.parametrize("nccl_like", [False, True], ids=["gloo", "nccl-like"])
"""A back end that reports a death, and one that does not (nccl_like.py)."""


@BACK_ENDS
@pytest.mark.parametrize(
    "death", [*QUICK, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)], ids=lambda death: death[0]
)
def test_the_survivors_finish_the_step(tmp_path: Path, death: tuple[str, int], nccl_like: bool) -> None:
    losses, state = undisturbed(tmp_path)
    with ElasticProcesses(work, 3, settings(), tmp_path, {1: death}, nccl_like=nccl_like) as processes:
        processes.killed = {1}
        found = processes.results()
    for value in found.values():
        assert value[1] == state
        assert value[0] == losses
        assert [each["process"] for each in value[2]["deaths"]] == [1]
    assert sorted(found) == [0, 2]


def test_a_death_does_not_change_the_noise_scale(tmp_path: Path) -> None:
    config = settings(noise_scale_every=1)
    with ElasticProcesses(work, 1, config, tmp_path / "alone", {}) as processes:
        alone = processes.results()[0]
    with ElasticProcesses(work, 3, config, tmp_path / "dies", {1: ("backward", 10)}) as processes:
        processes.killed = {1}
        found = processes.results()
    assert alone[2]["noise_scale"] > 0
    for value in found.values():
        assert value[:2] == alone[:2]
        assert value[2]["noise_scale"] == alone[2]["noise_scale"]


def test_processes_die_until_one_is_left(tmp_path: Path) -> None:
    losses, state = undisturbed(tmp_path)
    deaths = {0: ("backward", 3), 1: ("exchange", 8), 3: ("forward", 14)}
    with ElasticProcesses(work, 4, settings(), tmp_path, deaths) as processes:
        processes.killed = set(deaths)
        (found,) = processes.results().values()
    assert found[:2] == (losses, state)
    assert {each["process"] for each in found[2]["deaths"]} == {0, 1, 3}


@BACK_ENDS
def test_a_joining_process_takes_its_share(tmp_path: Path, nccl_like: bool) -> None:
    losses, state = undisturbed(tmp_path, steps=30)
    with ElasticProcesses(work, 2, settings(steps=30), tmp_path, {1: ("forward", 9)}, nccl_like=nccl_like) as processes:
        processes.killed = {1}
        processes.start(2, joins=True)
        found = processes.results()
    assert found[0][:2] == (losses, state)
    assert found[2][1] == state
    assert 0 < len(found[2][0]) < 30
    assert found[2][0] == losses[-len(found[2][0]) :]
    assert found[0][2]["ranks"] == 2


@BACK_ENDS
def test_a_death_during_an_evaluation_and_a_checkpoint(tmp_path: Path, nccl_like: bool) -> None:
    expected = run_ranks(evaluated, 1, settings(), tmp_path / "alone", {})[0]
    config = settings(checkpoint=CheckpointSettings(every=2))
    for death in (("evaluate", 2), ("checkpoint", 2)):
        with ElasticProcesses(evaluated, 3, config, tmp_path / death[0], {0: death}, nccl_like=nccl_like) as processes:
            processes.killed = {0}
            found = processes.results()
        assert found == {1: expected, 2: expected}
        assert [path.name for path in sorted((tmp_path / death[0] / "checkpoints").iterdir())][-1] == "step-00000008"


def evaluated(world: World, config: Settings, folder: Path, deaths: dict[int, tuple[str, int]]) -> Any:
    with join(world, divided=config.parallel.shard != 1) as group:
        if world.number in deaths:
            die_at(*deaths[world.number])
        run = build_run(config, world, group, folder, verified=True)
        model = run.place(MLP)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        points, found = Points(101), []
        for step in run.steps(points):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y, reduction="sum"), weight=len(y))
            step.update(optimizer)
            found.append(run.evaluate(model, points, right))
            found.append(run.predict(model, points).sum().item())
        finish_run(run)
        close_run(run)
        return found, run.context.state.fingerprint()


def right(out: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple[float, int]:
    return float((out.argmax(-1) == y).sum()), len(y)


def test_a_save_is_lost_with_its_writer_and_repeated_at_the_next_one(tmp_path: Path) -> None:
    config = settings(checkpoint=CheckpointSettings(every=2, keep=10))
    alone = run_ranks(large, 1, config, tmp_path / "alone", {})[0]
    with ElasticProcesses(large, 3, config, tmp_path / "run", {0: 2}) as processes:
        processes.killed = {0}
        assert processes.results() == {1: alone, 2: alone}
    kept = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert kept == {"step-00000002", "step-00000006", "step-00000008"}  # after 4 it was being written
    assert newest(tmp_path / "run", print) == tmp_path / "run" / "checkpoints" / "step-00000008"


def test_a_save_continues_if_its_writer_lives(tmp_path: Path) -> None:
    config = settings(checkpoint=CheckpointSettings(every=2, keep=10))
    alone = run_ranks(large, 1, config, tmp_path / "alone", {})[0]
    with ElasticProcesses(large, 3, config, tmp_path / "run", {1: 2, 2: 2}) as processes:
        processes.killed = {1, 2}
        assert processes.results() == {0: alone}
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} == {f"step-0000000{n}" for n in "2468"}


def large(world: World, config: Settings, folder: Path, deaths: dict[int, int]) -> Any:
    """Train a state that takes a while to write; kill processes when a given number of saves have begun."""
    with join(world) as group:
        left = deaths.get(world.number or 0, 0) if group.size > 1 else 0

        def observe(before: str, entered: str) -> None:
            nonlocal left
            left -= before == "checkpoint" != entered
            if left == 0 and before == "checkpoint" != entered:
                os.kill(os.getpid(), signal.SIGKILL)

        phases.observe(observe)
        run = build_run(config, world, group, folder, verified=True)
        model = run.place(MLP)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ballast = torch.nn.Module()
        ballast.register_buffer("zeros", torch.zeros(4_000_000))
        run.track(model=model, optimizer=optimizer, ballast=ballast)
        for step in run.steps(Points(101)):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y, reduction="sum"), weight=len(y))
            step.update(optimizer)
        finish_run(run)
        close_run(run)
        return run.context.state.fingerprint()


PHASES = ("data", "forward", "backward", "exchange", "update", "checkpoint", "other", "evaluate")


def long_work(
    world: World, config: Settings, folder: Path, deaths: dict[int, tuple[str, int]], resume: bool = False
) -> Any:
    """Evaluate in every step and save often; each process records the steps that it has finished."""
    with join(world, divided=config.parallel.shard != 1) as group:
        if world.number in deaths:
            die_at(*deaths[world.number])
        run = build_run(config, world, group, folder, resume=resume, verified=True)
        model = run.place(MLP)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        run.track(model=model, optimizer=optimizer)
        points, finished = Points(101), []
        for step in run.steps(points):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y, reduction="sum"), weight=len(y))
            step.update(optimizer)
            finished.append(step.number)
            if len(finished) == 1 and (membership := membership_of(group)) is not None:
                membership.report(begun=True)
            if step.every(20):
                run.evaluate(model, points, right)
            if (folder / "enough").exists():
                run.stop()
        finish_run(run)
        close_run(run)
        return finished, run.context.state.fingerprint()


@pytest.mark.slow
@pytest.mark.timeout(600)
@BACK_ENDS
def test_a_soak_of_thirty_kills_ends_with_the_bits_of_an_undisturbed_run(tmp_path: Path, nccl_like: bool) -> None:
    config = settings(steps=10_000, checkpoint=CheckpointSettings(every=7))
    chance = random.Random(7)
    deaths = {number: (chance.choice(PHASES), chance.randrange(3, 60)) for number in range(200) if number % 2}
    with ElasticProcesses(
        long_work, 4, config, tmp_path / "soak", deaths, seconds=120, nccl_like=nccl_like
    ) as processes:
        gone: set[int] = set()
        while len(gone) < 36:
            time.sleep(chance.uniform(0.1, 0.6))
            processes.look(doomed=set(deaths))
            processes.kill(*next_victims(processes, chance, doomed=set(deaths)))
            fallen = set(processes.processes) - set(processes.alive) - gone
            gone |= fallen
            for _ in fallen:
                processes.start(len(processes.processes), joins=True)
        (tmp_path / "soak" / "enough").touch()
        processes.killed |= set(deaths)
        found = processes.results()
    told = [value for value in found.values() if value is not None]  # None: too late to join
    assert told
    steps = told[0][0][-1] + 1
    ((_, state),) = run_ranks(long_work, 1, settings(steps=steps), tmp_path / "alone", {}, seconds=300)
    for finished, fingerprint in told:
        assert fingerprint == state
        assert finished == list(range(finished[0], steps))


def next_victims(processes: ElasticProcesses, chance: random.Random, doomed: set[int]) -> set[int]:
    """Return the processes to kill now: one, sometimes two at once, sometimes the main process.

    One process that has the state of the run, and will not die by itself, stays alive. With the last such process the
    state would be lost.
    """
    begun = {event["number"] for event in processes.events if "begun" in event}
    members = [number for number in processes.roster if number in processes.alive]
    safe = [number for number in members if number in begun and number not in doomed]
    others = [number for number in members if number != safe[-1]] if safe else []
    if len(others) < 2:
        return set()
    victims = chance.sample(others, 1 + (chance.random() < 0.2))
    return {*victims, *others[: chance.random() < 0.2]}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_everything_is_killed_twenty_times_and_resumed_on_any_number_of_processes(tmp_path: Path) -> None:
    config = settings(steps=300, checkpoint=CheckpointSettings(every=7))
    ((_, state),) = run_ranks(long_work, 1, config, tmp_path / "alone", {}, seconds=120)
    chance = random.Random(11)
    for _ in range(20):
        with ElasticProcesses(long_work, chance.randrange(1, 6), config, tmp_path / "run", {}, True) as processes:
            time.sleep(chance.uniform(0.2, 2.0))
            processes.kill(*processes.alive)
            processes.results(dead=True)
    with ElasticProcesses(long_work, 3, config, tmp_path / "run", {}, True, seconds=200) as processes:
        assert {fingerprint for _, fingerprint in processes.results().values()} == {state}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt", "sometimes"])
def test_work_stealing_loader_workers_and_odd_models_recover(tmp_path: Path, kind: str) -> None:
    more = {"balance": BalanceSettings(work_stealing=True), "loader": LoaderSettings(workers=1), "micro_batch": 1}
    (alone,) = run_ranks(train, 1, kind, settings(micro_batch=1), str(tmp_path / "alone"), 101, False, None, None, True)
    with ElasticProcesses(
        work, 3, settings(**more), tmp_path, {0: ("backward", 12), 2: ("exchange", 9)}, kind
    ) as processes:
        processes.killed = {0, 2}
        (found,) = processes.results().values()
    assert found[:2] == (alone["losses"], alone["state"])


@pytest.mark.slow
def test_a_step_of_two_passes_recovers(tmp_path: Path) -> None:
    expected = run_ranks(two_passes, 1, settings(), tmp_path / "alone", {})[0]
    for times in (4, 5, 8, 9):
        with ElasticProcesses(two_passes, 3, settings(), tmp_path / str(times), {1: ("exchange", times)}) as processes:
            processes.killed = {1}
            assert processes.results() == {0: expected, 2: expected}


def two_passes(world: World, config: Settings, folder: Path, deaths: dict[int, tuple[str, int]]) -> Any:
    with join(world, divided=config.parallel.shard != 1) as group:
        if world.number in deaths:
            die_at(*deaths[world.number])
        run = build_run(config, world, group, folder, verified=True)
        one, other = run.place(MLP), run.place(MLP)
        first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, other))
        run.track(one=one, other=other, first=first, second=second)
        for step in run.steps(Points(101)):
            for x, y in step.over(first):
                step.backward(F.cross_entropy(one(x) + other(x), y, reduction="sum"), weight=len(y))
            for x, y in step.over(second):
                step.backward(F.cross_entropy(one(x) - other(x), y, reduction="sum"), weight=len(y))
            step.update(first, second)
        finish_run(run)
        close_run(run)
        return run.context.state.fingerprint()


@pytest.mark.parametrize("times", [2, 3])
def test_a_death_in_an_evaluation_between_two_passes(tmp_path: Path, times: int) -> None:
    """In the second pass survivors compute other virtual ranks than in the first."""
    expected = run_ranks(evaluates_between, 1, settings(steps=5), tmp_path / "alone", {})[0]
    with ElasticProcesses(evaluates_between, 3, settings(steps=5), tmp_path, {1: ("evaluate", times)}) as processes:
        processes.killed = {1}
        assert processes.results() == {0: expected, 2: expected}


def evaluates_between(world: World, config: Settings, folder: Path, deaths: dict[int, tuple[str, int]]) -> Any:
    with join(world) as group:
        if world.number in deaths:
            die_at(*deaths[world.number])
        run = build_run(config, world, group, folder, verified=True)
        one, other, found = run.place(MLP), run.place(MLP), []
        first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, other))
        run.track(one=one, other=other, first=first, second=second)
        for step in run.steps(Points(101)):
            step.run(one, summed, over=[first])
            step.update(first)
            found.append(run.evaluate(one, Points(57), right))
            step.run(other, summed, over=[second])
            step.update(second)
        finish_run(run)
        close_run(run)
        return found, run.context.state.fingerprint()


def summed(out: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(out, y, reduction="sum"), len(y)
