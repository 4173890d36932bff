"""Buffers that a forward pass changes: the same on any number of processes, and what plain torch makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.ranks.loops import SETTINGS, Numbers, attempt, loss_of, train
from unisono.environment import World
from unisono.testing import run_ranks
from unisono.train.run import Run


class Counted(nn.Linear):
    """A forward that puts another tensor into a buffer's place."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + len(x)
        return super().forward(x)


class Growing(nn.Linear):
    """A buffer that is None until the first forward, and longer with every one after it."""

    rows: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_buffer("rows", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(0, keepdim=True)
        self.rows = mean if self.rows is None else torch.cat((self.rows, mean))
        return super().forward(x) + self.rows.mean()


class Secret(nn.Linear):
    """Running statistics of one's own, given to torch's batch_norm, which writes to them without saying so."""

    mean: torch.Tensor
    var: torch.Tensor

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("var", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(super().forward(x), self.mean, self.var, training=self.training)


class Twice(nn.Module):
    """One batch norm that each forward runs twice, and another beside it that has stopped learning."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2, momentum=0.3)
        self.still = nn.BatchNorm1d(2).eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.still.eval()
        out: torch.Tensor = self.still(self.norm(self.linear(x)) + self.norm(self.linear(-x)))
        return out


def norms(momentum: float | None) -> nn.Module:
    wide = nn.BatchNorm1d(6, momentum=momentum)
    return nn.Sequential(nn.Linear(3, 6), wide, nn.GELU(), nn.Linear(6, 2), nn.BatchNorm1d(2, affine=False))


def spectral() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)), nn.Linear(4, 2))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: norms(0.1),
    "batch norm that averages": lambda: norms(None),
    "batch norm run twice": Twice,
    "instance norm": lambda: nn.Sequential(
        nn.Linear(3, 6), nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()
    ),
    "spectral norm": spectral,
    "a counter": Counted,
    "a list": Growing,
    "batch norm as a function": Secret,
}
CONFIG = replace(SETTINGS, steps=5, batch=8, virtual_ranks=4)


def all_models(world: World, folder: str, names: list[str]) -> dict[str, Any]:
    """What the loop tells of every model: losses and a fingerprint. Of 23 numbers the last batch has 7, which four
    virtual ranks share as 1, 2, 2, 2; batch norms take 22, and three virtual ranks."""
    told = {}
    for i, name in enumerate(names):
        config = replace(CONFIG, virtual_ranks=3) if "norm" in name else CONFIG

        def loop(run: Run[Any], name: str = name) -> Any:
            return train(run, data=Numbers(22 if "norm" in name else 23), build=MODELS[name])

        told[name] = attempt(world, Path(folder) / str(i), loop, config)
    return told


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("buffers")
    return [told for size in (1, 2, 3) for told in run_ranks(all_models, size, str(folder / str(size)), list(MODELS))]


@pytest.mark.parametrize("name", MODELS)
def test_any_number_of_processes_makes_the_same_of_them(runs: list[dict[str, Any]], name: str) -> None:
    told = [run[name] for run in runs]
    assert isinstance(told[0], list), told[0]
    assert all(other == told[0] for other in told[1:])


def by_hand(run: Run[Any], momentum: float | None) -> dict[str, float]:
    """Our buffers, and those of a model that walks through the same micro-batches in their order: how far apart."""
    model = run.place(lambda: norms(momentum))
    twin = norms(momentum)
    twin.load_state_dict(model.state_dict())
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, twin))
    run.track(model=model, optimizer=ours)
    for step in run.steps(Numbers(22)):
        theirs.zero_grad()
        for x, i in step:
            loss_of(twin, x).backward()
            step.backward(loss_of(model, x), weight=len(i))
        for p in twin.parameters():
            assert p.grad is not None
            p.grad /= step.weight
        step.update(ours)
        theirs.step()
    want = twin.state_dict()
    return {name: float((value - want[name]).abs().max()) for name, value in model.state_dict().items()}


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_is_what_one_process_makes_of_all_micro_batches(tmp_path: Path, momentum: float | None) -> None:
    loop, config = partial(by_hand, momentum=momentum), replace(CONFIG, virtual_ranks=3)
    (apart,) = run_ranks(attempt, 1, tmp_path, loop, config)
    assert max(apart.values()) < 1e-5, apart
    assert apart["1.num_batches_tracked"] == 0


def halves(world: World, folder: str, stop: bool) -> Any:
    def after(step: Any, optimizer: Any) -> None:
        step.update(optimizer)
        if stop and step.number == 2:
            held[0].stop()

    held: list[Any] = []

    def loop(run: Run[Any]) -> Any:
        held.append(run)
        return train(run, data=Numbers(22), build=MODELS["batch norm"], after=after)[-1]

    return attempt(world, Path(folder), loop, replace(CONFIG, virtual_ranks=3, steps=8), resume=not stop)


def test_they_are_saved_and_resumed_on_another_number_of_processes(tmp_path: Path) -> None:
    whole = run_ranks(halves, 1, str(tmp_path / "whole"), False)
    run_ranks(halves, 3, str(tmp_path / "run"), True)
    assert run_ranks(halves, 2, str(tmp_path / "run"), False) == whole * 2


def evaluated(run: Run[Any]) -> Any:
    """A forward in eval mode that counts: an evaluation leaves nothing behind, though processes see different parts."""
    model = run.place(Counted)
    before = run.context.state.fingerprint(), model.seen.item()
    run.evaluate(model, Numbers(), lambda output, x, i: (output.sum(), len(i)))
    return before == (run.context.state.fingerprint(), model.seen.item())


def test_an_evaluation_leaves_them_as_they_were(tmp_path: Path) -> None:
    assert run_ranks(attempt, 2, tmp_path, evaluated) == [True, True]
