"""Synchronous parameter servers: the bits of the tree for any number of workers and servers, and after a resume."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks.loops import attempt, linear
from tests.ranks.loops import train as small
from tests.ranks.training import loop, settings, train
from unisono.config import CheckpointSettings, ServerSettings, Settings
from unisono.distributed.process_group import ProcessGroup
from unisono.distributed.roles import ParameterAssignment, assign_roles
from unisono.environment import World
from unisono.testing import run_ranks
from unisono.train.run import Run

TREE = settings(clip=0.5, checkpoint=CheckpointSettings(every=3, keep=9))


def server_settings(config: Settings, count: int) -> Settings:
    return replace(config, exchange="server", server=ServerSettings(count=count))


def comparable(out: dict[str, Any]) -> tuple[Any, ...]:
    return out["losses"], out["norms"], out["state"]


@pytest.fixture(scope="module", params=["mlp", "gpt"])
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """Train on one process with exchange=tree."""
    (out,) = run_ranks(train, 1, request.param, TREE, str(tmp_path_factory.mktemp("alone")), 53)
    return request.param, comparable(out)


@pytest.mark.ci
@pytest.mark.parametrize(("size", "count"), [(2, 1), (4, 1), (4, 2), (5, 3)])
def test_servers_match_one_process(reference: tuple[str, Any], size: int, count: int, tmp_path: Path) -> None:
    kind, expected = reference
    outs = run_ranks(train, size, kind, server_settings(TREE, count), str(tmp_path), 53)
    assert [comparable(out) for out in outs] == [expected] * size
    assert [out["rounds"] > 0 for out in outs] == [rank >= count for rank in range(size)]
    assert outs[0]["result"]["promise"] == "exact"


def state_of(world: World, folder: Path, config: Settings) -> Any:
    """Train, and return the number of parameters with optimizer state on this process."""

    def tell(run: Run[Any]) -> int:
        optimizers: list[torch.optim.Optimizer] = []

        def make(model: nn.Module) -> torch.optim.Optimizer:
            optimizers.append(torch.optim.AdamW(model.parameters(), lr=0.01))
            return optimizers[0]

        small(run, build=lambda: nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2)), make=make)
        return len(optimizers[0].state)

    return attempt(world, folder, tell, config)


def test_only_servers_have_optimizer_state(tmp_path: Path) -> None:
    config = replace(server_settings(Settings(steps=2, batch=8, virtual_ranks=4), 2))
    first, second, *workers = run_ranks(state_of, 4, tmp_path, config)
    assert first > 0
    assert second > 0
    assert first + second == 4
    assert workers == [0, 0]


def train_part(world: World, folder: str, config: Settings, stop_after: int | None, resume: bool) -> Any:
    out = attempt(
        world,
        Path(folder),
        lambda run: loop(run, "gpt", 53, {}, stop_after, False) | {"state": run.context.state.fingerprint()},
        config,
        resume=resume,
    )
    assert isinstance(out, dict), out
    return out["losses"], out["state"]


@pytest.mark.ci
@pytest.mark.parametrize(("before", "after"), [((4, 2), (3, 1)), ((3, 1), (4, 2)), ((2, 0), (4, 2)), ((4, 2), (1, 0))])
def test_resume_with_other_servers_or_without(before: tuple[int, int], after: tuple[int, int], tmp_path: Path) -> None:
    """The second number of each pair is that of servers; 0: exchange=tree."""
    ((_, expected),) = run_ranks(train_part, 1, str(tmp_path / "whole"), TREE, None, False)
    folder = str(tmp_path / "parts")
    for (size, count), stop in ((before, 4), (after, None)):
        config = server_settings(TREE, count) if count else TREE
        outs = run_ranks(train_part, size, folder, config, stop, stop is None)
    assert {state for _, state in outs} == {expected}


def freeze_and_unfreeze(world: World, folder: Path, config: Settings) -> Any:
    """Freeze a parameter for a step; later it is on the server that has its momentum."""

    def tell(run: Run[Any]) -> Any:
        seen: list[nn.Module] = []

        def build() -> nn.Module:
            seen.append(nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2)))
            return seen[0]

        def after(step: Any, optimizer: Any) -> None:
            step.update(optimizer)
            for p in seen[0][0].parameters():  # type: ignore[index]
                p.requires_grad_(step.number != 0)

        return small(run, after=after, build=build, data=None)

    return attempt(world, folder, tell, config)


def test_parameter_stays_on_its_server_while_others_are_frozen(tmp_path: Path) -> None:
    config = Settings(steps=5, batch=8, virtual_ranks=4)
    (expected,) = run_ranks(freeze_and_unfreeze, 1, tmp_path / "a", config)
    assert run_ranks(freeze_and_unfreeze, 4, tmp_path / "b", server_settings(config, 2)) == [expected] * 4


class CustomOptimizer:
    """An optimizer that is not a torch.optim.Optimizer."""

    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": list(params)}]

    def step(self) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.data.sub_(p.grad, alpha=0.1)

    def zero_grad(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None: ...


def train_with_custom_optimizer(world: World, folder: Path, config: Settings) -> Any:
    return attempt(world, folder, lambda run: small(run, make=lambda m: CustomOptimizer(m.parameters())), config)


def test_custom_optimizer_has_one_server(tmp_path: Path) -> None:
    config = Settings(steps=2, batch=8, virtual_ranks=4)
    one = run_ranks(train_with_custom_optimizer, 3, tmp_path / "one", server_settings(config, 1))
    assert one == run_ranks(train_with_custom_optimizer, 1, tmp_path / "tree", config) * 3
    for message in run_ranks(train_with_custom_optimizer, 3, tmp_path / "two", server_settings(config, 2)):
        assert "several servers" in message


def test_parameters_are_divided_evenly_and_keep_their_server() -> None:
    params = [torch.zeros(size) for size in (100, 3, 50, 50, 7, 200, 1, 90)]
    shares = ParameterAssignment(3)
    first = [shares.of(p) for p in params[:4]]
    shares.assign(params)
    assert [shares.of(p) for p in params[:4]] == first
    total = sum(p.nbytes for p in params)
    assert sum(shares.bytes) == total
    assert max(shares.bytes) <= total / 3 + 800


def test_roles_of_processes() -> None:
    crew = assign_roles(ProcessGroup(rank=1, size=4), 2)
    assert (crew.is_server, list(crew.workers)) == (True, [2, 3])
    assert not assign_roles(ProcessGroup(rank=2, size=4), 2).is_server


def test_torch_optimizers_skip_parameters_without_gradient() -> None:
    """Workers call optimizer.step(), too."""
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop,
                 torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax, torch.optim.Adadelta, torch.optim.Rprop,
                 torch.optim.ASGD, torch.optim.Adafactor):  # fmt: skip
        model = linear()
        before = copy.deepcopy(model.state_dict())
        optimizer: Any = kind(model.parameters(), lr=0.1)
        optimizer.step()
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
