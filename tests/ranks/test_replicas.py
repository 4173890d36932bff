"""Models that several processes share: a death removes the replica, and the other replicas continue."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F

from tests.pairs import every_pair
from tests.ranks.elastic import ElasticProcesses
from tests.ranks.test_step_recovery import evaluated, long_work, two_passes, undisturbed, work
from tests.ranks.training import MLP, settings, tensors
from unisono import phases
from unisono.config import CheckpointSettings, ParallelSettings, Settings
from unisono.distributed.init import join_process_group as join
from unisono.environment import World
from unisono.testing import build_run, close_run, finish_run, run_ranks, run_result
from unisono.train.gradient_pass import GradientPass

Gather = Literal["layer", "step"]


DEATHS = [("forward", 9), ("backward", 10), ("exchange", 3), ("update", 3)]
STEP_IS_SLOW = ["layer", pytest.param("step", marks=pytest.mark.slow)]


@pytest.mark.ci
@pytest.mark.parametrize(("gather", "death"), every_pair(["layer", "step"], DEATHS))
def test_the_other_replica_finishes_the_step(tmp_path: Path, gather: Gather, death: tuple[str, int]) -> None:
    losses, state = undisturbed(tmp_path, noise=False)
    config = settings(parallel=ParallelSettings(shard=2, reshard=gather))
    with ElasticProcesses(work, 4, config, tmp_path, {1: death}) as processes:
        processes.killed = {1}
        found = processes.results()
    assert sorted(found) == [2, 3]
    for value in found.values():
        assert value[:2] == (losses, state)
        assert [each["process"] for each in value[2]["deaths"]] == [1, 0]


def dies_beside_spare_rounds(world: World, config: Settings, folder: Path, dead: int) -> Any:
    """Kill process `dead` in step 2, while the replica that verifies the step is in a spare round."""
    with join(world, divided=True) as group:
        run = build_run(config, world, group, folder, verified=True)
        model = run.place(MLP)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        run.track(model=model, optimizer=optimizer)
        spare, losses = 0, []
        for step in run.steps(tensors(101)):
            for x, y in step:
                if step.number == 2 and world.rank == dead:
                    os.kill(os.getpid(), signal.SIGKILL)
                loss = F.cross_entropy(model(x), y, reduction="sum")
                if step.number == 2 and not step.counts and config.parallel.shard > 1:
                    spare += 1
                    assert group.monitor is not None
                    while not group.monitor.has_lost_peer(0.2):
                        time.sleep(0.01)
                step.backward(loss, weight=len(y))
            step.update(optimizer)
            losses.append(step.loss)
        finish_run(run)
        close_run(run)
        return losses, run.context.state.fingerprint(), spare, run_result(run)


def test_a_death_within_spare_rounds_breaks_no_promise(tmp_path: Path) -> None:
    """The results of a replica for layers that it could not gather are not compared."""
    (alone,) = run_ranks(dies_beside_spare_rounds, 1, settings(), tmp_path / "alone", -1)
    config = settings(parallel=ParallelSettings(shard=2, reshard="layer"))
    with ElasticProcesses(dies_beside_spare_rounds, 4, config, tmp_path, 1) as processes:
        processes.killed = {1}
        found = processes.results()
    assert sorted(found) == [2, 3]
    for losses, state, spare, result in found.values():
        assert (losses, state, result["promise"]) == (alone[0], alone[1], "exact")
        assert spare > 0


@pytest.mark.parametrize("gather", STEP_IS_SLOW)
def test_a_replica_joins(tmp_path: Path, gather: Gather) -> None:
    losses, state = undisturbed(tmp_path, noise=False, steps=30)
    config = settings(steps=30, parallel=ParallelSettings(shard=2, reshard=gather))
    with ElasticProcesses(work, 4, config, tmp_path, {3: ("forward", 9)}) as processes:
        processes.killed = {3}
        processes.start(6, joins=True)
        processes.start(7, joins=True)
        found = processes.results()
    assert found[0][:2] == (losses, state)
    assert found[0][2]["ranks"] == 4
    for new in (6, 7):
        assert found[new][1] == state
        assert 0 < len(found[new][0]) < 30
        assert found[new][0] == losses[-len(found[new][0]) :]


@pytest.mark.slow
@pytest.mark.parametrize("gather", ["layer", "step"])
def test_a_death_in_an_evaluation_and_in_a_checkpoint(tmp_path: Path, gather: Gather) -> None:
    checkpoint = CheckpointSettings(every=2)
    expected = run_ranks(evaluated, 1, settings(), tmp_path / "alone", {})[0]
    config = settings(checkpoint=checkpoint, parallel=ParallelSettings(shard=2, reshard=gather))
    for death in (("evaluate", 2), ("checkpoint", 2)):
        with ElasticProcesses(evaluated, 4, config, tmp_path / death[0], {0: death}) as processes:
            processes.killed = {0}
            found = processes.results()
        assert found == {2: expected, 3: expected}
        assert [path.name for path in sorted((tmp_path / death[0] / "checkpoints").iterdir())][-1] == "step-00000008"


@pytest.mark.parametrize("gather", ["layer", "step"])
def test_two_passes_wait_for_one_update(tmp_path: Path, gather: Gather) -> None:
    """Each pass uses both models, and keeps the gradient of the other pass."""
    alone, shared = settings(), settings(parallel=ParallelSettings(shard=2, reshard=gather))
    (expected,) = run_ranks(two_passes, 1, alone, tmp_path / "alone", {})
    assert run_ranks(two_passes, 2, shared, tmp_path / "shared", {}) == [expected, expected]


@pytest.mark.slow
@pytest.mark.parametrize("gather", ["layer", "step"])
def test_a_step_of_two_passes_goes_on(tmp_path: Path, gather: Gather) -> None:
    expected = run_ranks(two_passes, 1, settings(), tmp_path / "alone", {})[0]
    config = settings(parallel=ParallelSettings(shard=2, reshard=gather))
    for times in (4, 5, 8, 9):
        with ElasticProcesses(two_passes, 4, config, tmp_path / str(times), {1: ("exchange", times)}) as processes:
            processes.killed = {1}
            assert processes.results() == {2: expected, 3: expected}


def dies_with_its_result(world: World, config: Settings, folder: Path, step: int) -> Any:
    """Kill process 1 when it holds a step's whole gradient, before it can report so: the others hold it as well."""
    if world.number == 1:
        left = step

        def hold(gradient: GradientPass, whole: bool) -> None:
            nonlocal left
            left -= whole
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        GradientPass.is_whole = property(lambda _: False, hold)  # type: ignore[assignment]
    return work(world, config, folder, {})


@pytest.mark.parametrize("gather", ["layer", "step"])
def test_what_all_hold_is_not_made_again(tmp_path: Path, gather: Gather) -> None:
    losses, state = undisturbed(tmp_path, noise=False)
    config = settings(parallel=ParallelSettings(shard=2, reshard=gather))
    with ElasticProcesses(dies_with_its_result, 4, config, tmp_path, 3) as processes:
        processes.killed = {1}
        found = processes.results()
    for value in found.values():
        assert value[:2] == (losses, state)


def test_two_that_die_at_once_take_two_replicas_out(tmp_path: Path) -> None:
    losses, state = undisturbed(tmp_path, noise=False)
    config = settings(parallel=ParallelSettings(shard=2))
    with ElasticProcesses(work, 6, config, tmp_path, {0: ("backward", 5), 3: ("backward", 5)}) as processes:
        processes.killed = {0, 3}
        found = processes.results()
    assert sorted(found) == [4, 5]
    for value in found.values():
        assert value[:2] == (losses, state)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("gather", ["layer", "step"])
def test_a_soak_of_kills(tmp_path: Path, gather: Gather) -> None:
    """Any process dies at any moment, but for those of one replica with the run's state; new replicas join."""
    chance = random.Random(3)
    config = settings(
        steps=10_000, checkpoint=CheckpointSettings(every=7), parallel=ParallelSettings(shard=2, reshard=gather)
    )
    with ElasticProcesses(long_work, 4, config, tmp_path / "soak", {}, seconds=120) as processes:
        kills = 0
        while kills < 15:
            time.sleep(chance.uniform(0.1, 1.0))
            processes.look(doomed=set())
            begun = {event["number"] for event in processes.events if "begun" in event}
            units = [processes.roster[at : at + 2] for at in range(0, len(processes.roster), 2)]
            safe = [unit for unit in units if set(unit) <= begun & set(processes.alive)]
            others = [
                number for unit in units if safe and unit != safe[-1] for number in unit if number in processes.alive
            ]
            if others:
                processes.kill(chance.choice(others))
                kills += 1
                for _ in range(2):  # an even number, and the next one: both places of a replica
                    processes.start(len(processes.processes), joins=True)
        (tmp_path / "soak" / "enough").touch()
        told = [value for value in processes.results().values() if value is not None]
    steps = told[0][0][-1] + 1
    ((_, state),) = run_ranks(long_work, 1, settings(steps=steps), tmp_path / "alone", {}, seconds=300)
    for finished, fingerprint in told:
        assert fingerprint == state
        assert finished == list(range(finished[0], steps))


def clips(world: World, config: Settings, folder: Path, dead: int) -> Any:
    """Kill process `dead` as the third update begins, before its gradients are clipped; process 1 is late."""
    times = 0

    def observe(_: str, entered: str) -> None:
        nonlocal times
        times += entered == "update"
        if entered == "update" and times == 3 and world.number == dead:
            os.kill(os.getpid(), signal.SIGKILL)
        if entered == "update" and times == 3 and world.number == 1:
            time.sleep(0.3)  # process 0 waits for its part of the norm

    phases.observe(observe)
    return work(world, config, folder, {})


@pytest.mark.parametrize("gather", STEP_IS_SLOW)
def test_a_death_while_others_clip(tmp_path: Path, gather: Gather) -> None:
    losses, state = undisturbed(tmp_path, noise=False, clip=0.1)
    config = settings(clip=0.1, parallel=ParallelSettings(shard=2, reshard=gather))
    with ElasticProcesses(clips, 4, config, tmp_path, 3) as processes:
        processes.killed = {2, 3}
        found = processes.results()
    assert sorted(found) == [0, 1]
    for value in found.values():
        assert value[:2] == (losses, state)
        assert [each["process"] for each in value[2]["deaths"]] == [3, 2]
