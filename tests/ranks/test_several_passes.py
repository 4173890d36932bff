"""Several passes per step, several or custom optimizers, and loops without data have the same bits."""

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

from tests.ranks.loops import SETTINGS, Numbers, attempt, loss_of, results_on_sizes
from unisono.environment import World
from unisono.testing import run_ranks
from unisono.train.run import Run
from unisono.train.step import Step

CONFIG = replace(SETTINGS, steps=6, batch=8, virtual_ranks=4)


class Adversaries:
    """A generator and a discriminator with their optimizers, placed and tracked."""

    def __init__(self, run: Run[Any]) -> None:
        self.g = run.place(lambda: nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)))
        self.d = run.place(lambda: nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 1)))
        self.of_g = torch.optim.Adam(self.g.parameters(), lr=0.01)
        self.of_d = torch.optim.Adam(self.d.parameters(), lr=0.01)
        run.track(g=self.g, d=self.d, of_g=self.of_g, of_d=self.of_d)

    def loss_d(self, x: torch.Tensor) -> torch.Tensor:
        fake = self.g(torch.randn(len(x), 2))
        return (
            F.softplus(-self.d(x)).sum() + F.softplus(self.d(fake)).sum()
        )  # not detached: this pass gives g no gradient

    def loss_g(self, x: torch.Tensor) -> torch.Tensor:
        return F.softplus(-self.d(self.g(torch.randn(len(x), 2)))).sum()

    def penalty(self, x: torch.Tensor) -> torch.Tensor:
        """Return the gradient penalty between real and generated points (WGAN-GP, arXiv 1704.00028)."""
        between = torch.lerp(x, self.g(torch.randn(len(x), 2)).detach(), torch.rand(len(x), 1)).requires_grad_()
        (slope,) = torch.autograd.grad(self.d(between).sum(), between, create_graph=True)
        return (slope.norm(dim=1) - 1).square().sum()


def alternating(run: Run[Any]) -> Any:
    """Update the discriminator twice, with a gradient penalty, then the generator."""
    a = Adversaries(run)
    results: list[Any] = []
    for step in run.steps(Numbers(23)):
        for _ in range(2):
            for x, i in step.over(a.of_d):
                step.backward(a.loss_d(x) + 10 * a.penalty(x), weight=len(i))
                step.add("seen", i.sum(), len(i))
            assert all(p.grad is None for p in a.g.parameters())
            norm = step.grad_norm
            step.update(a.of_d, clip=0.5)
        results += [step.loss, norm, step.mean("seen")]
        step.run(
            a.g,
            lambda out, x, i: (F.softplus(-a.d(out)).sum(), len(i)),
            forward=lambda g, b: g(torch.randn(len(b[0]), 2)),
            over=[a.of_g],
        )
        assert all(p.grad is None for p in a.d.parameters())
        step.update(a.of_g)
        results += [step.loss, step.weight, step.mean("seen")]
    return [*results, run.context.state.fingerprint()]


def together(run: Run[Any]) -> Any:
    """Compute both gradients with the same weights, then update both."""
    a = Adversaries(run)
    for step in run.steps(Numbers(23)):
        for x, i in step.over(a.of_d):
            step.backward(a.loss_d(x), weight=len(i))
        for x, i in step.over(a.of_g):
            step.backward(a.loss_g(x), weight=len(i))
        assert all(p.grad is not None for m in (a.d, a.g) for p in m.parameters())
        step.update(a.of_g, a.of_d)
    return run.context.state.fingerprint()


def one_per_step(run: Run[Any]) -> Any:
    """Update one of the two in each step."""
    a = Adversaries(run)
    for step in run.steps(Numbers(23)):
        optimizer, loss = (a.of_d, a.loss_d) if step.number % 2 else (a.of_g, a.loss_g)
        for x, i in step.over(optimizer):
            step.backward(loss(x), weight=len(i))
        step.update(optimizer)
    return run.context.state.fingerprint()


class SignOfMomentum(torch.optim.Optimizer):
    """A custom optimizer (Lion, arXiv 2302.06675)."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    p -= group["lr"] * torch.lerp(momentum, p.grad, 0.1).sign()
                    momentum.lerp_(p.grad, 0.01)


class Warmup(torch.optim.lr_scheduler.LRScheduler):
    """A custom schedule."""

    def get_lr(self) -> list[float | torch.Tensor]:
        return [lr * min(1.0, (self.last_epoch + 1) / 4) for lr in self.base_lrs]


def custom_optimizer(run: Run[Any]) -> Any:
    """Use a custom optimizer and schedule, a weight average, and changed gradients."""
    model = run.place(lambda: nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)))
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = SignOfMomentum(model.parameters(), lr=0.01)
    schedule = Warmup(optimizer)
    run.track(model=model, average=average, optimizer=optimizer, schedule=schedule)
    for step in run.steps(Numbers(22)):
        step.run(model, lambda out, x, i: ((out - x.sum(1, keepdim=True)).square().sum(), len(i)))
        for p in model.parameters():
            if p.grad is not None and p.dim() > 1:
                p.grad -= p.grad.mean(dim=1, keepdim=True)  # gradient centralization, arXiv 2004.01461
        step.update(optimizer, schedule)
        average.update_parameters(model)
    mean = run.evaluate(average, Numbers(22), lambda out, x, i: (out.square().sum(), len(i)))
    return [mean, run.context.state.fingerprint()]


def without_data(run: Run[Any]) -> Any:
    """Train on generated points, whose micro-batch numbers continue from step to step."""
    model = run.place(lambda: nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run.track(model=model, optimizer=optimizer)
    sums = []
    for step in run.steps():
        for numbers in step:
            step.add("numbers", sum(numbers))
            step.backward(loss_of(model, torch.randn(len(numbers), 3)), weight=len(numbers))
        step.update(optimizer)
        sums.append(step.sum("numbers"))
    assert sums == [sum(range(8 * n, 8 * n + 8)) for n in range(6)]
    return run.context.state.fingerprint()


LOOPS: dict[str, Callable[[Run[Any]], Any]] = {
    "alternating": alternating,
    "together": together,
    "in turn": one_per_step,
    "of one's own": custom_optimizer,
    "without data": without_data,
}


def run_loops(world: World, folder: str, changes: dict[str, Any]) -> dict[str, Any]:
    return {
        name: attempt(world, Path(folder) / name, loop, replace(CONFIG, virtual_ranks=3, **changes), verified=True)
        for name, loop in LOOPS.items()
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results_on_sizes(run_loops, tmp_path_factory.mktemp("passes"), {})


@pytest.mark.parametrize("name", LOOPS)
def test_bits_do_not_depend_on_the_number_of_processes(runs: list[dict[str, Any]], name: str) -> None:
    assert not str(runs[0][name]).startswith(("unisono", "Assertion")), runs[0][name]
    assert all(results[name] == runs[0][name] for results in runs)


def test_passes_in_half_precision(tmp_path: Path) -> None:
    changes = {"precision": "bf16"}
    first, *others = [results for n in (1, 2) for results in run_ranks(run_loops, n, str(tmp_path / str(n)), changes)]
    assert all(results == first for results in others)
    assert "Error" not in str(first)


def by_hand(run: Run[Any]) -> Any:
    """Compute both losses by hand with one virtual rank and the same random numbers."""
    a = Adversaries(run)
    twins = [
        nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)),
        nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 1)),
    ]
    for twin, model in zip(twins, (a.g, a.d), strict=True):
        twin.load_state_dict(model.state_dict())
    twin_g, twin_d = twins
    of_g, of_d = (torch.optim.Adam(t.parameters(), lr=0.01) for t in twins)
    for step in run.steps(Numbers(23)):
        for x, i in step.over(a.of_d):
            state = torch.get_rng_state()
            step.backward(a.loss_d(x), weight=len(i))
            after = torch.get_rng_state()
            torch.set_rng_state(state)
            fake = twin_g(torch.randn(len(x), 2))
            of_d.zero_grad()
            (F.softplus(-twin_d(x)).sum() + F.softplus(twin_d(fake)).sum()).backward()
            divide(twin_d, len(i))
            of_d.step()
            assert torch.equal(torch.get_rng_state(), after)
        step.update(a.of_d)
        for x, i in step.over(a.of_g):
            state = torch.get_rng_state()
            step.backward(a.loss_g(x), weight=len(i))
            torch.set_rng_state(state)
            of_g.zero_grad()
            F.softplus(-twin_d(twin_g(torch.randn(len(x), 2)))).sum().backward()
            divide(twin_g, len(i))
            of_g.step()
        step.update(a.of_g)
    pairs = zip(
        (*a.g.state_dict().values(), *a.d.state_dict().values()),
        (*twin_g.state_dict().values(), *twin_d.state_dict().values()),
        strict=True,
    )
    return all(torch.equal(ours, theirs) for ours, theirs in pairs)


def divide(model: nn.Module, by: int) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad /= by


def test_one_virtual_rank_matches_a_loop_by_hand(tmp_path: Path) -> None:
    assert run_ranks(attempt, 1, tmp_path, by_hand, replace(CONFIG, virtual_ranks=1)) == [True]


# -- violations of the contract


def repeat_pass(step: Step, a: Adversaries) -> None:
    for _ in range(2):
        for x, i in step.over(a.of_d):
            step.backward(a.loss_d(x), weight=len(i))


def nested_pass(step: Step, a: Adversaries) -> None:
    for x, i in step.over(a.of_d):
        step.backward(a.loss_d(x), weight=len(i))
        for _ in step.over(a.of_g):
            pass


def pass_after_update(step: Step, a: Adversaries) -> None:
    for x, i in step:
        step.backward(a.loss_d(x), weight=len(i))
    step.update(a.of_d, a.of_g)
    for _ in step.over(a.of_g):
        pass


def missing_update(step: Step, a: Adversaries) -> None:
    same = [a.of_d, a.of_g]
    for optimizer in same:
        for x, i in step.over(optimizer):
            step.backward(a.loss_d(x) + a.loss_g(x), weight=len(i))
    step.update(a.of_d)


def without_a_pass(step: Step, a: Adversaries) -> None:
    for x, i in step.over(a.of_d):
        step.backward(a.loss_d(x), weight=len(i))
    step.update(a.of_d, a.of_g)


def no_pass(step: Step, a: Adversaries) -> None:
    for _ in step.over():
        pass


BREACHES: dict[str, tuple[Callable[[Step, Adversaries], None], str]] = {
    "the same parameters again": (repeat_pass, "began a pass over the same parameters again"),
    "inside": (nested_pass, "began another pass inside of one"),
    "after all": (pass_after_update, "began another pass inside of one"),
    "forgotten": (missing_update, "ended without an update"),
    "without a pass": (without_a_pass, "No pass of this step has made a gradient"),
    "nothing": (no_pass, "holds no parameter"),
}


def run_wrong(run: Run[Any], body: Callable[[Step, Adversaries], None]) -> None:
    a = Adversaries(run)
    for step in run.steps(Numbers(23)):
        body(step, a)


def wrong_bodies(world: World, folder: str) -> dict[str, Any]:
    return {
        name: attempt(world, Path(folder) / name, partial(run_wrong, body=body), replace(CONFIG, virtual_ranks=3))
        for name, (body, _) in BREACHES.items()
    }


def test_wrong_passes_raise_the_same_error_on_all_processes(tmp_path: Path) -> None:
    first, second = run_ranks(wrong_bodies, 2, str(tmp_path))
    for name, (_, words) in BREACHES.items():
        assert words in first[name], first[name]
        assert second[name] == first[name]
