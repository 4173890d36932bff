"""Load balancing and work stealing move virtual ranks to faster processes without changing bits."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.pairs import every_pair
from tests.ranks import training
from unisono.config import BalanceSettings, LoaderSettings, Settings
from unisono.config.mesh_shape import MeshShape
from unisono.data.loader import Schedule
from unisono.distributed.init import join_process_group as join
from unisono.distributed.mesh import build_mesh
from unisono.distributed.process_group import ProcessGroup
from unisono.environment import World
from unisono.testing import SlowAt, build_run, close_run, run_ranks
from unisono.train.balance.rebalance import Rebalancer
from unisono.train.balance.work_stealing import NoWorkStealing, WorkStealing
from unisono.train.step_sync import StepSync

CLAIMED: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (3, {"virtual_ranks": 12, "batch": 24, "loader": LoaderSettings(workers=1)}),  # batches are prefetched
    (2, {"batch": 36, "micro_batch": 2, "clip": 0.5}),  # several micro-batches per virtual rank
    (4, {"virtual_ranks": 13, "batch": 13}),  # some virtual ranks are empty in the last step of an epoch
]
"""Number of processes, and changes of training.settings."""


def train_slowed(world: World, config: Settings, folder: str, slow: int | None, times: float) -> dict[str, Any]:
    with SlowAt(times) if world.rank == slow else nullcontext():
        return training.train(world, "mlp", config, folder, length=403)


@pytest.mark.parametrize(("size", "slow", "workers"), [pytest.param(2, 1, 1, marks=pytest.mark.slow), (3, 0, 0)])
def test_slow_process_computes_less_with_the_same_bits(tmp_path: Path, size: int, slow: int, workers: int) -> None:
    config = replace(training.settings(steps=50, batch=48, virtual_ranks=12), loader=LoaderSettings(workers=workers))
    (reference,) = run_ranks(train_slowed, 1, config, str(tmp_path / "alone"), None, 1.0)
    found = run_ranks(train_slowed, size, config, str(tmp_path / "slow"), slow, 4.0)
    assert {f["state"] for f in found} == {reference["state"]}
    assert found[0]["losses"] == reference["losses"]
    deals = found[0]["result"]["assignments"]
    assert [f["result"]["assignments"] for f in found] == [deals] * size
    counts = deals[0]["virtual_ranks"]
    assert counts[slow] == min(counts) < 12 // size
    assert sum(counts) == 12
    assert found[slow]["rounds"] < 50 * 12 // size


def test_assignment_is_fixed_when_balancing_is_off(tmp_path: Path) -> None:
    config = replace(training.settings(steps=40), balance=BalanceSettings(by_speed=False))
    found = run_ranks(train_slowed, 2, config, str(tmp_path), 1, 4.0)
    assert "assignments" not in found[0]["result"]
    assert abs(found[0]["rounds"] - found[1]["rounds"]) <= 3  # the last batch of an epoch is smaller


def test_very_slow_process_gets_no_work_and_is_named(tmp_path: Path) -> None:
    config = replace(training.settings(steps=40, batch=24, virtual_ranks=3))
    found = run_ranks(train_slowed, 3, config, str(tmp_path), 2, 10.0)
    assert found[0]["result"]["assignments"][0]["virtual_ranks"][2] == 0
    (reference,) = run_ranks(train_slowed, 1, config, str(tmp_path / "alone"), None, 1.0)
    assert {f["state"] for f in found} == {reference["state"]}


def train_with_stealing(world: World, config: Settings, folder: str, kind: str, times: float) -> dict[str, Any]:
    """Train with work stealing in each step but the fourth; in each step another process is slow."""
    torch.manual_seed(world.rank)
    with join(world) as group, SlowAt(1.0) as slow:
        run = build_run(config, world, group, Path(folder))
        data = training.DATA[kind](101)
        model = run.place(training.TinyGPT if kind == "gpt" else training.MLP)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        run.track(model=model, optimizer=optimizer)
        losses, rounds, guests = [], 0, 0
        for step in run.steps(data, collate_fn=training.padded if kind == "gpt" else None):
            assert run.context.parts is not None
            stealing = run.context.parts.source.stealing
            if isinstance(stealing, WorkStealing):
                group.barrier()  # a run draws no tickets in the step after one that turns stealing off; this test does
                stealing.on = step.number % 4 != 3
                slow.times = times if step.number % world.size == world.rank else 1.0
            for _ in range(2 if step.number == 2 else 1):  # step 2 has two passes
                for x, y in step.over(optimizer):
                    rounds += 1
                    out = model(x)
                    loss = F.cross_entropy(out.flatten(0, -2), y.flatten(), reduction="sum", ignore_index=-100)
                    step.backward(loss, weight=(y != -100).sum())
                step.update(optimizer)
            losses.append(step.loss)
        if isinstance(stealing, WorkStealing):
            guests = stealing.guests
        close_run(run)
        return {"losses": losses, "rounds": rounds, "guests": guests, "state": run.context.state.fingerprint()}


@pytest.mark.ci
@pytest.mark.parametrize(("case", "kind"), every_pair(CLAIMED, ["mlp", "gpt"]))
def test_work_stealing_has_the_same_bits(tmp_path: Path, kind: str, case: tuple[int, dict[str, Any]]) -> None:
    size, changes = case
    config = training.settings(steps=10, balance=BalanceSettings(work_stealing=True), **changes)
    (reference,) = run_ranks(train_with_stealing, 1, config, str(tmp_path / "alone"), kind, 1.0)
    found = run_ranks(train_with_stealing, size, config, str(tmp_path / "claimed"), kind, 5.0)
    assert {f["state"] for f in found} == {reference["state"]}
    assert found[0]["losses"] == reference["losses"]
    assert sum(f["rounds"] for f in found) == reference["rounds"]
    assert sum(f["guests"] for f in found) > 0


def test_slow_process_without_work_is_named() -> None:
    """It has no measured time in the step in which the others are faster."""
    message: list[str] = []
    source: Any = SimpleNamespace(schedule=Schedule(((0, 1), (1, 2), (2, 3))), stealing=NoWorkStealing())
    world = ProcessGroup(size=3)
    mesh = replace(build_mesh(MeshShape(), ProcessGroup()), axes=MeshShape(replicate=3), world=world)
    rebalancer = Rebalancer(
        Settings(steps=1, batch=3, virtual_ranks=3), mesh, source, StepSync(3, world), message.append, 0
    )
    for step, seconds in enumerate([[1.0, 1.0, 1.0]] * 60 + [[0.01, 0.01, 0.0]] * 100):
        rebalancer.apply(step, [(took, float(step), 0.0) for took in seconds])
    assert any(
        line.startswith("Rank 2 would take 1e+03 ms for a virtual rank, where the others take 10:") for line in message
    )
