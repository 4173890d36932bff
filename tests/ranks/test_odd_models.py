"""Models that do what models do: write where nobody looks, share their parts, register late. The same bits anywhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.ranks.loops import SETTINGS, Numbers, attempt, loss_of, sgd, train
from unisono.environment import World
from unisono.testing import run_ranks
from unisono.train.run import Run

CONFIG = replace(SETTINGS, steps=4, batch=12, virtual_ranks=3)


class Late(nn.Linear):
    """Statistics of its own, which torch's batch_norm writes to without a word, and only from the second step on."""

    mean: torch.Tensor
    var: torch.Tensor

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.on = False
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("var", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return F.batch_norm(y, self.mean, self.var, training=self.training) if self.on else y


class Lazy(nn.Linear):
    """A buffer that the first forward registers, from its data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "average"):
            self.register_buffer("average", x.mean().detach())
        self.average: torch.Tensor = 0.9 * self.average + 0.1 * x.mean().detach()
        return super().forward(x) + self.average


class Uncounted(nn.BatchNorm1d):
    """A batch norm with a forward of its own, which does not count."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.running_mean is not None
        with torch.no_grad():
            self.running_mean += 0.1 * (x.mean(0) - self.running_mean)
        return (x - x.mean(0)) * (x.var(0, unbiased=False) + self.eps).rsqrt()


class Centre(nn.Module):
    """A loss with a buffer and without parameters."""

    centre: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(2))

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        self.centre.lerp_(y.detach().mean(0), 0.2)
        return (y - self.centre).square().sum()


class Stretching(nn.Linear):
    """A forward that changes a parameter where no version tells, and takes longer on one process than on another."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.2 * dist.get_rank())
        self.weight.data.mul_(0.99)
        return super().forward(x)


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 2))


def loop(run: Run[Any], model: nn.Module, between: Callable[[int], None] = lambda _: None) -> list[Any]:
    optimizer = sgd(model)
    run.track(model=model, optimizer=optimizer)
    losses = []
    for step in run.steps(Numbers(24)):
        between(step.number)
        for x, i in step:
            step.backward(loss_of(model, x), weight=len(i))
        step.update(optimizer)
        losses.append(step.loss)
    return [*losses, run.context.state.fingerprint()]


def late(run: Run[Any]) -> Any:
    model = run.place(Late)
    return loop(run, model, lambda step: setattr(model, "on", step > 0))


def inside_another(run: Run[Any]) -> Any:
    body = run.place(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=None)))
    model = run.place(nn.Sequential(body, nn.Linear(4, 2)))
    told = loop(run, model)
    norm = body[1]
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.num_batches_tracked == 4 * 3
    return told


def restored(run: Run[Any]) -> Any:
    """Statistics put back between two steps, through .data."""
    model = run.place(normed)
    best = {name: b.clone() for name, b in model.named_buffers()}

    def restore(step: int) -> None:
        for name, b in model.named_buffers():
            b.data.copy_(best[name])

    return loop(run, model, restore)


def criterion(run: Run[Any]) -> Any:
    """Tracked and not placed."""
    model, centre = run.place(lambda: nn.Linear(3, 2)), Centre()
    optimizer = sgd(model)
    run.track(model=model, optimizer=optimizer, centre=centre)
    losses = []
    for step in run.steps(Numbers(24)):
        for x, i in step:
            step.backward(centre(model(x)), weight=len(i))
        step.update(optimizer)
        losses.append(step.loss)
    return [*losses, run.context.state.fingerprint()]


def evaluated(run: Run[Any]) -> Any:
    """With a model beside, and with one that a forward puts into training mode: both are as before."""
    model, beside = run.place(normed), run.place(normed)
    run.track(beside=beside)

    def forward(_: nn.Module, batch: Any) -> torch.Tensor:
        model.train()
        out: torch.Tensor = model(batch[0]) + beside(batch[0])
        return out

    def evaluate(step: int) -> None:
        before = run.context.state.fingerprint(), [m.training for m in (model, beside)]
        run.evaluate(model, Numbers(24), lambda out, x, i: (out.sum(), len(i)), forward=forward)
        assert before == (run.context.state.fingerprint(), [m.training for m in (model, beside)])

    optimizer = torch.optim.SGD([*model.parameters(), *beside.parameters()], lr=0.01)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(Numbers(24)):
        evaluate(step.number)
        for x, i in step:
            step.backward(loss_of(model, x) + loss_of(beside, x), weight=len(i))
        step.update(optimizer)
    return [run.context.state.fingerprint()]


class Reused(nn.Linear):
    """Its output is memory that the next forward writes to."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "out"):
            self.out = torch.zeros(64, 2)
        out = self.out[: len(x)]
        with torch.no_grad():
            out.copy_(super().forward(x))
        return out


def predicted(run: Run[Any]) -> Any:
    model = run.place(lambda: Reused(3, 2))
    rows = run.predict(model, Numbers(23))
    assert len(rows.unique(dim=0)) == 23
    return rows.tolist()


LOOPS: dict[str, Callable[[Run[Any]], Any]] = {
    "late and secretly": late,
    "inside another placed model": inside_another,
    "restored through data": restored,
    "registered by the first forward": lambda run: train(run, data=Numbers(24), build=lambda: Lazy(3, 2)),
    "uncounted": lambda run: train(run, data=Numbers(24), build=lambda: nn.Sequential(nn.Linear(3, 2), Uncounted(2))),
    "a criterion": criterion,
    "evaluated": evaluated,
    "predicted": predicted,
}


def all_loops(world: World, folder: str) -> dict[str, Any]:
    return {name: attempt(world, Path(folder) / name, body, CONFIG) for name, body in LOOPS.items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("odd")
    return [told for size in (1, 2, 3) for told in run_ranks(all_loops, size, str(folder / str(size)))]


@pytest.mark.parametrize("name", LOOPS)
def test_any_number_of_processes_gives_the_same_bits(runs: list[dict[str, Any]], name: str) -> None:
    assert isinstance(runs[0][name], list), runs[0][name]
    assert all(told[name] == runs[0][name] for told in runs)


# -- what is refused


def two(run: Run[Any]) -> tuple[Any, Any, Any, Any]:
    a, b = run.place(lambda: nn.Linear(3, 2)), run.place(lambda: nn.Linear(3, 2))
    of_a, of_b = sgd(a), sgd(b)
    run.track(a=a, b=b, of_a=of_a, of_b=of_b)
    return a, b, of_a, of_b


def swallowed(run: Run[Any]) -> None:
    """A schedule alone does not use the gradient that waits."""
    a, b, of_a, of_b = two(run)
    schedule = torch.optim.lr_scheduler.StepLR(of_a, 1)
    run.track(schedule=schedule)
    for step in run.steps(Numbers()):
        for model, optimizer in ((a, of_a), (b, of_b)):
            for x, i in step.over(optimizer):
                step.backward(loss_of(model, x), weight=len(i))
        step.update(of_a)
        step.update(schedule)


def frozen_between(run: Run[Any]) -> None:
    a, b, of_a, of_b = two(run)
    for step in run.steps(Numbers()):
        for model, optimizer in ((a, of_a), (b, of_b)):
            for x, i in step.over(optimizer):
                step.backward(loss_of(model, x), weight=len(i))
            a.requires_grad_(False)


def mean_later(run: Run[Any]) -> None:
    a, b, of_a, of_b = two(run)
    for step in run.steps(Numbers()):
        for x, i in step.over(of_a):
            step.backward(loss_of(a, x), weight=len(i))
        for x, i in step.over(of_b):
            step.backward(b(x).square().mean(), weight=len(i))


def evaluated_within(run: Run[Any]) -> None:
    a, *_ = two(run)
    for step in run.steps(Numbers()):
        for _ in step:
            run.predict(a, Numbers())


REFUSED: dict[str, tuple[Callable[[Run[Any]], Any], str]] = {
    "swallowed": (swallowed, "ended without an update"),
    "frozen between passes": (frozen_between, "while the gradient of an earlier pass waits"),
    "a mean in a later pass": (mean_later, "a loss that is a mean"),
    "within a round": (evaluated_within, "run.predict was called within a round"),
    "a parameter": (lambda run: train(run, build=lambda: Stretching(3, 2)), "changed the parameter weight"),
}


def refusals(world: World, folder: str) -> dict[str, Any]:
    return {name: attempt(world, Path(folder) / name, body, CONFIG) for name, (body, _) in REFUSED.items()}


def test_what_would_be_lost_in_silence_is_told(tmp_path: Path) -> None:
    for told in run_ranks(refusals, 2, str(tmp_path)):
        for name, (_, words) in REFUSED.items():
            assert words in str(told[name]), told[name]


def norms_of_skipped(run: Run[Any]) -> list[tuple[bool, bool]]:
    """grad_norm is there after an update that was skipped, with clipping."""
    model = run.place(lambda: nn.Linear(3, 2))
    optimizer = sgd(model)
    run.track(model=model, optimizer=optimizer)
    told = []
    for step in run.steps(Numbers()):
        for x, i in step:
            step.backward(loss_of(model, x * (1e4 if step.number == 0 else 1)), weight=len(i))
        step.update(optimizer, clip=1.0)
        told.append((step.skipped, step.grad_norm == float("inf")))
    return told


def test_a_skipped_step_has_a_norm(tmp_path: Path) -> None:
    (told,) = run_ranks(attempt, 1, tmp_path, norms_of_skipped, replace(CONFIG, precision="fp16"))
    assert told[0] == (True, True)
    assert all(skip == infinite for skip, infinite in told)
