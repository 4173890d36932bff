"""Pruning: the same zeros and the same bits on any number of processes, with shards, after a kill and a resume."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.ranks.elastic import ElasticProcesses
from tests.ranks.loops import attempt
from tests.ranks.test_shard_replica import TwoMatrices
from unisono import pruning
from unisono.config import CheckpointSettings, ParallelSettings, Settings
from unisono.distributed.init import join_process_group as join
from unisono.distributed.process_group import to_local
from unisono.environment import World
from unisono.pruning.pruned_weights import PrunedWeights
from unisono.testing import build_run, close_run, finish_run, run_ranks, run_result
from unisono.train.run import Run

CONFIG = Settings(steps=8, batch=16, virtual_ranks=8, seed=3, clip=1.0)
SHARDED = replace(CONFIG, parallel=ParallelSettings(shard=2))
PLAN: dict[str, Any] = {"sparsity": 0.7, "begin": 2, "end": 6, "every": 2}


class Network(nn.Module):
    """Tied matrices, a norm, and a matrix whose rows are uneven over two and four processes."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 12)
        self.norm = nn.LayerNorm(12)
        self.inner = nn.Linear(12, 7)
        self.again = nn.Linear(12, 7)
        self.again.weight = self.inner.weight
        self.leave = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm(self.enter(x)))
        out: Tensor = self.leave(F.relu(self.inner(h)) + self.again(h))
        return out


SIZES = {"enter.weight": 96, "inner.weight": 84, "leave.weight": 21}


def points(length: int = 64) -> TensorDataset:
    x = torch.randn(length, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] * x[:, 2] > 0).long())


def loss_fn(output: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, int]:
    return F.cross_entropy(output, y, reduction="sum"), len(y)


Make = Callable[[nn.Module, torch.optim.Optimizer], PrunedWeights]

WAYS: dict[str, Make] = {
    "magnitude": lambda model, _: pruning.MagnitudePruning(model, **PLAN),
    "global": lambda model, _: pruning.MagnitudePruning(model, **PLAN, scope="global"),
    "movement": lambda model, optimizer: pruning.MovementPruning(model, optimizer, **PLAN),
    "2:4": lambda model, _: pruning.SemiStructuredPruning(model, begin=3),
}


def train(run: Run[Any], way: str, watch: Callable[[int], None] = lambda number: None) -> Any:
    """Prune a network, and return (fingerprint, state's fingerprint, loss, promise, zeros, sparsities)."""
    model = run.place(Network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    pruner = WAYS[way](model, optimizer)
    run.track(model=model, optimizer=optimizer, pruning=pruner)
    sparsities = []
    for step in run.steps(points()):
        step.run(model, loss_fn)
        watch(step.number)
        step.update(optimizer, pruner)
        sparsities.append(pruner.sparsity)
        for name, p in model.named_parameters():
            if name in pruner.pruned:
                assert not to_local(p.detach())[to_local(pruner.pruned[name])].any(), name
    found = run_result(run)
    zeros = {name: int((whole(p) == 0).sum()) for name, p in model.named_parameters()}
    assert {name: zeros[name] for name in pruner.zeros} == pruner.zeros
    masks = [whole(mask).tolist() for mask in pruner.pruned.values()]
    return found["weights_sha256"], found["loss"], found["promise"], zeros, masks, sparsities[-1]


def whole(tensor: Any) -> Tensor:
    full: Tensor = tensor.detach().full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()
    return full


def train_all(world: World, folder: str, config: Settings, resume: bool = False) -> dict[str, Any]:
    return {
        way: attempt(world, Path(folder, way.replace(":", "-")), partial(train, way=way), config, resume=resume)
        for way in WAYS
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Train on one process."""
    (found,) = run_ranks(train_all, 1, str(tmp_path_factory.mktemp("alone")), CONFIG)
    assert all(isinstance(value, tuple) for value in found.values()), found
    return dict(found)


def test_the_number_of_zeros_is_exact(alone: dict[str, Any]) -> None:
    dense = {"enter.bias": 0, "norm.weight": 0, "norm.bias": 0, "inner.bias": 0, "again.bias": 0, "leave.bias": 0}
    expected = {name: round(0.7 * size) for name, size in SIZES.items()}
    for way in ("magnitude", "movement"):
        assert alone[way][3] == {**dense, **expected}
        assert alone[way][5] == sum(expected.values()) / sum(SIZES.values())
    zeros = alone["global"][3]
    assert sum(zeros.values()) == round(0.7 * sum(SIZES.values()))
    assert {name: zeros[name] for name in SIZES} != expected
    assert alone["2:4"][3] == {**dense, "enter.weight": 48, "inner.weight": 42, "leave.weight": 0}
    assert len({found[0] for found in alone.values()}) == len(WAYS)
    assert {found[2] for found in alone.values()} == {"exact"}


@pytest.mark.parametrize("size", [2, 3, pytest.param(5, marks=pytest.mark.slow)])
def test_any_number_of_processes(tmp_path: Path, alone: dict[str, Any], size: int) -> None:
    assert run_ranks(train_all, size, str(tmp_path), CONFIG) == [alone] * size


@pytest.mark.parametrize(
    ("size", "shard"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.slow), pytest.param(4, 4, marks=pytest.mark.slow)]
)
def test_shards(tmp_path: Path, alone: dict[str, Any], size: int, shard: int) -> None:
    config = replace(CONFIG, parallel=ParallelSettings(shard=shard))
    assert run_ranks(train_all, size, str(tmp_path), config) == [alone] * size


def prune_matrices(world: World, folder: str, config: Settings) -> Any:
    """Prune matrices with a tensor-parallel plan, and their average; return (loss, zeros, zeros of the average)."""

    def loop(run: Run[Any]) -> Any:
        model, average = (
            run.place(lambda: nn.Sequential(TwoMatrices(), TwoMatrices(), nn.Linear(12, 6))) for _ in range(2)
        )
        average.requires_grad_(False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        pruner = pruning.MovementPruning(model, optimizer, **PLAN, scope="global")
        run.track(model=model, average=average, optimizer=optimizer, pruning=pruner)
        x = torch.randn(64, 12, generator=torch.Generator().manual_seed(1))
        for step in run.steps(TensorDataset(x, (x[:, 0] > 0).long())):
            step.run(model, loss_fn)
            step.update(optimizer, pruner)
        with torch.no_grad():
            for name, mask in pruner.pruned.items():
                average.get_parameter(name).masked_fill_(mask, 0.0)  # as in docs/guide/pruning.md
        zeros = {name: int((whole(average.get_parameter(name)) == 0).sum()) for name in pruner.zeros}
        return run_result(run)["loss"], pruner.zeros, zeros

    return attempt(world, Path(folder), loop, config)


@pytest.mark.ci
@pytest.mark.parametrize("parallel", [ParallelSettings(shard=2), ParallelSettings(tensor=2)], ids=["shard", "tensor"])
def test_parts_of_matrices_get_the_zeros_of_the_whole(tmp_path: Path, parallel: ParallelSettings) -> None:
    (alone,) = run_ranks(prune_matrices, 1, str(tmp_path / "alone"), CONFIG)
    assert sum(alone[1].values()) == round(0.7 * (4 * 12 * 16 + 72))
    assert alone[1] == alone[2]
    config = replace(CONFIG, parallel=parallel)
    for loss, zeros, of_average in run_ranks(prune_matrices, 2, str(tmp_path / "divided"), config):
        assert loss == (alone[0] if parallel.tensor == 1 else pytest.approx(alone[0], rel=1e-4))
        assert zeros == of_average == alone[1]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("first", "second"), [((2, CONFIG), (3, CONFIG)), ((2, SHARDED), (1, CONFIG)), ((1, CONFIG), (2, SHARDED))]
)
@pytest.mark.parametrize("steps", [1, 5])
def test_a_resume_on_another_number_of_processes(
    tmp_path: Path, alone: dict[str, Any], first: tuple[int, Settings], second: tuple[int, Settings], steps: int
) -> None:
    run_ranks(train_all, first[0], str(tmp_path), replace(first[1], steps=steps))
    assert run_ranks(train_all, second[0], str(tmp_path), second[1], True) == [alone] * second[0]


def elastic(world: World, folder: Path, config: Settings, way: str, number: int, at: int) -> Any:
    """Train as process `number` is killed in step `at`, in the update or in the chosen zeros."""

    def watch(step: int) -> None:
        if (world.number, step) == (number, at):
            os.kill(os.getpid(), signal.SIGKILL)

    with join(world, divided=config.parallel.shard != 1) as group:
        run = build_run(config, world, group, folder)
        found = train(run, way, watch)
        finish_run(run)
        close_run(run)
        return found


@pytest.mark.parametrize("way", ["global", "movement"])
def test_the_other_processes_continue_after_a_kill(tmp_path: Path, alone: dict[str, Any], way: str) -> None:
    with ElasticProcesses(elastic, 3, tmp_path, CONFIG, way, 1, 3) as processes:
        processes.killed = {1}
        assert processes.results() == {0: alone[way], 2: alone[way]}


@pytest.mark.parametrize("way", ["magnitude", pytest.param("movement", marks=pytest.mark.slow)])
def test_the_other_replica_continues_after_a_kill(tmp_path: Path, alone: dict[str, Any], way: str) -> None:
    with ElasticProcesses(elastic, 4, tmp_path, SHARDED, way, 1, 3) as processes:
        processes.killed = {1}
        assert processes.results() == {2: alone[way], 3: alone[way]}


def test_a_joining_process_has_the_masks(tmp_path: Path) -> None:
    config = replace(CONFIG, steps=40, checkpoint=CheckpointSettings(every=0))
    (expected,) = run_ranks(train_one, 1, str(tmp_path / "alone"), config)
    with ElasticProcesses(elastic, 2, tmp_path / "run", config, "movement", 1, 3) as processes:
        processes.killed = {1}
        processes.start(2, joins=True)
        found = processes.results()
    assert found[0] == expected
    assert found[2][:5] == expected[:5]


def train_one(world: World, folder: str, config: Settings) -> Any:
    return attempt(world, Path(folder), partial(train, way="movement"), config)


# -- errors

OTHER: dict[str, tuple[Make, str]] = {
    "sparsity": (
        lambda model, _: pruning.MagnitudePruning(model, **{**PLAN, "sparsity": 0.5}),
        "The checkpoint has final=0.7, and is 0.5 now.",
    ),
    "method": (lambda model, _: pruning.SemiStructuredPruning(model, begin=2), "method='MagnitudePruning'"),
    "parameters": (
        lambda model, _: pruning.MagnitudePruning(model, **PLAN, names=["enter.*"]),
        "Cannot resume with a pruning of other parameters.\n  inner.weight has the shape (7, 12) in the checkpoint",
    ),
}


def resume_otherwise(world: World, folder: str) -> dict[str, Any]:
    def loop(run: Run[Any], make: Make) -> None:
        model = run.place(Network)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
        run.track(model=model, optimizer=optimizer, pruning=make(model, optimizer))

    return {
        name: attempt(world, Path(folder, "magnitude"), partial(loop, make=make), CONFIG, resume=True)
        for name, (make, _) in OTHER.items()
    }


def test_a_resume_with_another_pruning_is_refused(tmp_path: Path) -> None:
    run_ranks(train_all, 1, str(tmp_path), replace(CONFIG, steps=3))
    (found,) = run_ranks(resume_otherwise, 1, str(tmp_path))
    for name, (_, message) in OTHER.items():
        assert found[name].startswith("unisono.errors.CheckpointError: Cannot resume with"), found[name]
        assert message in found[name]


@pytest.mark.parametrize(
    ("config", "setting"),
    [
        (replace(CONFIG, exchange="local_sgd"), "exchange=local_sgd"),
        (replace(CONFIG, exchange="server"), "exchange=server"),
        (replace(CONFIG, parallel=ParallelSettings(pipeline=2)), "parallel.pipeline=2"),
    ],
    ids=["local_sgd", "server", "pipeline"],
)
def test_layouts_without_equal_weights_are_refused(tmp_path: Path, config: Settings, setting: str) -> None:
    for found in run_ranks(chain, 2, str(tmp_path), config):
        assert f"LoopError: MagnitudePruning does not work with {setting}." in str(found)


def chain(world: World, folder: str, config: Settings) -> Any:
    def loop(run: Run[Any]) -> None:
        model = run.place(lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        pruner = pruning.MagnitudePruning(model, **PLAN)
        run.track(model=model, optimizer=optimizer, pruning=pruner)
        for step in run.steps(points()):
            step.run(model, loss_fn)
            step.update(optimizer, pruner)

    return attempt(world, Path(folder), loop, config)


def test_an_untracked_pruning_is_an_error(tmp_path: Path) -> None:
    (found,) = run_ranks(untracked, 1, str(tmp_path))
    assert "MagnitudePruning is part of it but not tracked" in found


def untracked(world: World, folder: str) -> Any:
    def loop(run: Run[Any]) -> None:
        model = run.place(Network)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        pruner = pruning.MagnitudePruning(model, **PLAN)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(points()):
            step.run(model, loss_fn)
            step.update(optimizer, pruner)

    return attempt(world, Path(folder), loop, CONFIG)
