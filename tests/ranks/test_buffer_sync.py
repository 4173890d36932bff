"""Buffers that a forward pass changes: equal for any number of processes, and as in plain torch."""

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

from tests.ranks.loops import SETTINGS, Numbers, assert_same_results, attempt, loss_of, train
from unisono.environment import World
from unisono.testing import run_ranks
from unisono.train.run import Run


class ReplacedBuffer(nn.Linear):
    """A forward pass that replaces a buffer by another tensor."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + len(x)
        return super().forward(x)


class GrowingBuffer(nn.Linear):
    """A buffer that is None before the first forward pass, and grows in each one."""

    rows: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_buffer("rows", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(0, keepdim=True)
        self.rows = mean if self.rows is None else torch.cat((self.rows, mean))
        return super().forward(x) + self.rows.mean()


class FunctionalBatchNorm(nn.Linear):
    """Running statistics that F.batch_norm changes without a new version of the tensor."""

    mean: torch.Tensor
    var: torch.Tensor

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("var", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(super().forward(x), self.mean, self.var, training=self.training)


class SharedBatchNorm(nn.Module):
    """A batch norm that each forward pass calls twice, and one whose parameters are frozen."""

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
    "batch norm run twice": SharedBatchNorm,
    "instance norm": lambda: nn.Sequential(
        nn.Linear(3, 6), nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()
    ),
    "spectral norm": spectral,
    "a counter": ReplacedBuffer,
    "a list": GrowingBuffer,
    "batch norm as a function": FunctionalBatchNorm,
}
CONFIG = replace(SETTINGS, steps=5, batch=8, virtual_ranks=4)


def train_all(world: World, folder: str, names: list[str]) -> dict[str, Any]:
    """Train each model, and return losses and fingerprint.

    The last batch of 23 samples has 7, which four virtual ranks share as 1, 2, 2, 2. Models with batch norm use 22
    samples and three virtual ranks.
    """
    results = {}
    for i, name in enumerate(names):
        config = replace(CONFIG, virtual_ranks=3) if "norm" in name else CONFIG

        def loop(run: Run[Any], name: str = name) -> Any:
            return train(run, data=Numbers(22 if "norm" in name else 23), build=MODELS[name])

        results[name] = attempt(world, Path(folder) / str(i), loop, config)
    return results


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("buffers")
    return [
        results for size in (1, 2, 3) for results in run_ranks(train_all, size, str(folder / str(size)), list(MODELS))
    ]


@pytest.mark.ci
@pytest.mark.parametrize("name", MODELS)
def test_buffers_do_not_depend_on_the_number_of_processes(runs: list[dict[str, Any]], name: str) -> None:
    assert_same_results(runs, name)


def distance_to_plain_torch(run: Run[Any], momentum: float | None) -> dict[str, float]:
    """Return the distance of our buffers from those of plain torch with the same micro-batches in order."""
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
def test_batch_norm_matches_plain_torch_on_all_micro_batches(tmp_path: Path, momentum: float | None) -> None:
    loop, config = partial(distance_to_plain_torch, momentum=momentum), replace(CONFIG, virtual_ranks=3)
    (apart,) = run_ranks(attempt, 1, tmp_path, loop, config)
    assert max(apart.values()) < 1e-5, apart
    assert apart["1.num_batches_tracked"] == 0


def train_half(world: World, folder: str, stop: bool) -> Any:
    def after(step: Any, optimizer: Any) -> None:
        step.update(optimizer)
        if stop and step.number == 2:
            held[0].stop()

    held: list[Any] = []

    def loop(run: Run[Any]) -> Any:
        held.append(run)
        return train(run, data=Numbers(22), build=MODELS["batch norm"], after=after)[-1]

    return attempt(world, Path(folder), loop, replace(CONFIG, virtual_ranks=3, steps=8), resume=not stop)


def test_buffers_are_restored_on_another_number_of_processes(tmp_path: Path) -> None:
    whole = run_ranks(train_half, 1, str(tmp_path / "whole"), False)
    run_ranks(train_half, 3, str(tmp_path / "run"), True)
    assert run_ranks(train_half, 2, str(tmp_path / "run"), False) == whole * 2


def evaluate_counts(run: Run[Any]) -> Any:
    """Evaluate a model that counts forward passes in eval mode, of which processes have different numbers."""
    model = run.place(ReplacedBuffer)
    before = run.context.state.fingerprint(), model.seen.item()
    run.evaluate(model, Numbers(), lambda output, x, i: (output.sum(), len(i)))
    return before == (run.context.state.fingerprint(), model.seen.item())


def test_evaluation_does_not_change_buffers(tmp_path: Path) -> None:
    assert run_ranks(attempt, 2, tmp_path, evaluate_counts) == [True, True]
