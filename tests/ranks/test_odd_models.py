"""Unusual models (hidden writes, shared modules, late registration) have the same bits on any number of processes."""

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

from tests.ranks.loops import SETTINGS, Numbers, assert_same_results, attempt, loss_of, results_on_sizes, sgd, train
from unisono.environment import World
from unisono.testing import run_ranks
from unisono.train.run import Run

CONFIG = replace(SETTINGS, steps=4, batch=12, virtual_ranks=3)


class LateStatistics(nn.Linear):
    """Statistics that F.batch_norm changes without a new version, and only from the second step on."""

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


class LazyBuffer(nn.Linear):
    """A buffer that the first forward pass registers from its data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "average"):
            self.register_buffer("average", x.mean().detach())
        self.average: torch.Tensor = 0.9 * self.average + 0.1 * x.mean().detach()
        return super().forward(x) + self.average


class UncountedBatchNorm(nn.BatchNorm1d):
    """A batch norm with a forward method of its own that does not count batches."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.running_mean is not None
        with torch.no_grad():
            self.running_mean += 0.1 * (x.mean(0) - self.running_mean)
        return (x - x.mean(0)) * (x.var(0, unbiased=False) + self.eps).rsqrt()


class CenterLoss(nn.Module):
    """A loss with a buffer and without parameters."""

    centre: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(2))

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        self.centre.lerp_(y.detach().mean(0), 0.2)
        return (y - self.centre).square().sum()


class ChangesParameter(nn.Linear):
    """A forward pass that changes a parameter without a new version, and takes longer on one process."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.2 * dist.get_rank())
        self.weight.data.mul_(0.99)
        return super().forward(x)


def norm_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 2))


def loop(run: Run[Any], model: nn.Module, between_steps: Callable[[int], None] = lambda _: None) -> list[Any]:
    optimizer = sgd(model)
    run.track(model=model, optimizer=optimizer)
    losses = []
    for step in run.steps(Numbers(24)):
        between_steps(step.number)
        for x, i in step:
            step.backward(loss_of(model, x), weight=len(i))
        step.update(optimizer)
        losses.append(step.loss)
    return [*losses, run.context.state.fingerprint()]


def late_statistics(run: Run[Any]) -> Any:
    model = run.place(LateStatistics)
    return loop(run, model, lambda step: setattr(model, "on", step > 0))


def part_of_another(run: Run[Any]) -> Any:
    body = run.place(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=None)))
    model = run.place(nn.Sequential(body, nn.Linear(4, 2)))
    results = loop(run, model)
    norm = body[1]
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.num_batches_tracked == 4 * 3
    return results


def restore_statistics(run: Run[Any]) -> Any:
    """Restore statistics between two steps, through .data."""
    model = run.place(norm_model)
    best = {name: b.clone() for name, b in model.named_buffers()}

    def restore(step: int) -> None:
        for name, b in model.named_buffers():
            b.data.copy_(best[name])

    return loop(run, model, restore)


def criterion(run: Run[Any]) -> Any:
    """Use a loss module that is tracked and not placed."""
    model, centre = run.place(lambda: nn.Linear(3, 2)), CenterLoss()
    optimizer = sgd(model)
    run.track(model=model, optimizer=optimizer, centre=centre)
    losses = []
    for step in run.steps(Numbers(24)):
        for x, i in step:
            step.backward(centre(model(x)), weight=len(i))
        step.update(optimizer)
        losses.append(step.loss)
    return [*losses, run.context.state.fingerprint()]


def evaluate_two(run: Run[Any]) -> Any:
    """Evaluate with another model, and with a model whose forward pass calls train(); modes are restored."""
    model, beside = run.place(norm_model), run.place(norm_model)
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


class ReusedOutput(nn.Linear):
    """Returns a tensor that the next forward pass overwrites."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "out"):
            self.out = torch.zeros(64, 2)
        out = self.out[: len(x)]
        with torch.no_grad():
            out.copy_(super().forward(x))
        return out


def predict_reused(run: Run[Any]) -> Any:
    model = run.place(lambda: ReusedOutput(3, 2))
    rows = run.predict(model, Numbers(23))
    assert len(rows.unique(dim=0)) == 23
    return rows.tolist()


LOOPS: dict[str, Callable[[Run[Any]], Any]] = {
    "late and secretly": late_statistics,
    "inside another placed model": part_of_another,
    "restored through data": restore_statistics,
    "registered by the first forward": lambda run: train(run, data=Numbers(24), build=lambda: LazyBuffer(3, 2)),
    "uncounted": lambda run: train(
        run, data=Numbers(24), build=lambda: nn.Sequential(nn.Linear(3, 2), UncountedBatchNorm(2))
    ),
    "a criterion": criterion,
    "evaluated": evaluate_two,
    "predicted": predict_reused,
}


def run_loops(world: World, folder: str) -> dict[str, Any]:
    return {name: attempt(world, Path(folder) / name, body, CONFIG) for name, body in LOOPS.items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results_on_sizes(run_loops, tmp_path_factory.mktemp("odd"))


@pytest.mark.ci
@pytest.mark.parametrize("name", LOOPS)
def test_bits_do_not_depend_on_the_number_of_processes(runs: list[dict[str, Any]], name: str) -> None:
    assert_same_results(runs, name)


# -- refused models


def two_models(run: Run[Any]) -> tuple[Any, Any, Any, Any]:
    a, b = run.place(lambda: nn.Linear(3, 2)), run.place(lambda: nn.Linear(3, 2))
    of_a, of_b = sgd(a), sgd(b)
    run.track(a=a, b=b, of_a=of_a, of_b=of_b)
    return a, b, of_a, of_b


def schedule_without_update(run: Run[Any]) -> None:
    """Step only a schedule, which leaves a gradient unused."""
    a, b, of_a, of_b = two_models(run)
    schedule = torch.optim.lr_scheduler.StepLR(of_a, 1)
    run.track(schedule=schedule)
    for step in run.steps(Numbers()):
        for model, optimizer in ((a, of_a), (b, of_b)):
            for x, i in step.over(optimizer):
                step.backward(loss_of(model, x), weight=len(i))
        step.update(of_a)
        step.update(schedule)


def freeze_between_steps(run: Run[Any]) -> None:
    a, b, of_a, of_b = two_models(run)
    for step in run.steps(Numbers()):
        for model, optimizer in ((a, of_a), (b, of_b)):
            for x, i in step.over(optimizer):
                step.backward(loss_of(model, x), weight=len(i))
            a.requires_grad_(False)


def mean_in_second_micro_batch(run: Run[Any]) -> None:
    a, b, of_a, of_b = two_models(run)
    for step in run.steps(Numbers()):
        for x, i in step.over(of_a):
            step.backward(loss_of(a, x), weight=len(i))
        for x, i in step.over(of_b):
            step.backward(b(x).square().mean(), weight=len(i))


def evaluate_in_step(run: Run[Any]) -> None:
    a, *_ = two_models(run)
    for step in run.steps(Numbers()):
        for _ in step:
            run.predict(a, Numbers())


REFUSED: dict[str, tuple[Callable[[Run[Any]], Any], str]] = {
    "swallowed": (schedule_without_update, "ended without an update"),
    "frozen between passes": (freeze_between_steps, "while the gradient of an earlier pass waits"),
    "a mean in a later pass": (mean_in_second_micro_batch, "a loss that is a mean"),
    "within a round": (evaluate_in_step, "run.predict was called within a round"),
    "a parameter": (lambda run: train(run, build=lambda: ChangesParameter(3, 2)), "changed the parameter weight"),
}


def run_refused(world: World, folder: str) -> dict[str, Any]:
    return {name: attempt(world, Path(folder) / name, body, CONFIG) for name, (body, _) in REFUSED.items()}


def test_silent_losses_are_refused(tmp_path: Path) -> None:
    for results in run_ranks(run_refused, 2, str(tmp_path)):
        for name, (_, words) in REFUSED.items():
            assert words in str(results[name]), results[name]


def skipped_norms(run: Run[Any]) -> list[tuple[bool, bool]]:
    """Return whether each step was skipped and has a grad_norm, with clipping."""
    model = run.place(lambda: nn.Linear(3, 2))
    optimizer = sgd(model)
    run.track(model=model, optimizer=optimizer)
    results = []
    for step in run.steps(Numbers()):
        for x, i in step:
            step.backward(loss_of(model, x * (1e4 if step.number == 0 else 1)), weight=len(i))
        step.update(optimizer, clip=1.0)
        results.append((step.skipped, step.grad_norm == float("inf")))
    return results


def test_skipped_step_has_a_norm(tmp_path: Path) -> None:
    (results,) = run_ranks(attempt, 1, tmp_path, skipped_norms, replace(CONFIG, precision="fp16"))
    assert results[0] == (True, True)
    assert all(skip == infinite for skip, infinite in results)
