"""The exchange and the optimizer of docs/guide/exchanges/custom.md, on real processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.house.test_documentation import DOCS, blocks_of
from tests.ranks.loops import SETTINGS, Numbers, attempt, linear, loss_of, sgd, train
from tests.ranks.training import MLP, Points, settings
from unisono import Exchange
from unisono.config import CompressSettings, ParallelSettings, Settings
from unisono.testing import run_promise, run_ranks
from unisono.train.run import Run

DOCS_PAGE = DOCS / "guide" / "exchanges" / "custom.md"


def class_from_docs(name: str) -> Any:
    """Return a class as the docs show it."""
    (block,) = [block for block in blocks_of(DOCS_PAGE) if f"class {name}" in block.code]
    assert len(block.code.splitlines()) < 40
    names: dict[str, Any] = {}
    exec(compile(block.code, block.name, "exec"), names)
    return names[name]


def train_classifier(run: Run[Any], make: Callable[[nn.Module], Any] = sgd, exchange: Any = None) -> Any:
    """Train a classifier; return its losses, its fingerprint and the promise."""
    model = run.place(MLP)
    optimizer = make(model)
    run.track(model=model, optimizer=optimizer)
    losses = []
    for step in run.steps(Points(200), exchange=exchange):
        step.run(model, lambda out, x, y: (nn.functional.cross_entropy(out, y, reduction="sum"), len(y)))
        step.update(optimizer)
        losses.append(step.loss)
    return losses, run.context.state.fingerprint(), run_promise(run)


# -- the majority vote


def train_by_vote(run: Run[Any]) -> Any:
    return train_classifier(
        run, lambda model: torch.optim.SGD(model.parameters(), lr=0.01), class_from_docs("MajorityVote")
    )


def train_by_signs(run: Run[Any]) -> Any:
    """Train by the sign of the whole gradient, which is the vote of one process."""
    model = run.place(MLP)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    losses = []
    for step in run.steps(Points(200)):
        step.run(model, lambda out, x, y: (nn.functional.cross_entropy(out, y, reduction="sum"), len(y)))
        for p in model.parameters():
            assert p.grad is not None
            p.grad.sign_()
        step.update(optimizer)
        losses.append(step.loss)
    return losses, run.context.state.fingerprint(), run_promise(run)


def test_the_exchange_of_the_docs_trains(tmp_path: Path) -> None:
    """One process uses the sign of the gradient; several have the same weights, and the loss falls."""
    config = settings(steps=30)
    (single,) = run_ranks(attempt, 1, tmp_path / "hand", train_by_signs, config)
    for size in (1, 2, 3):
        found = run_ranks(attempt, size, tmp_path / str(size), train_by_vote, config)
        for losses, fingerprint, promise in found:
            assert fingerprint == found[0][1]
            assert losses[-1] < 0.7 * losses[0]
            assert promise[0] == "depends on the number of sites"
            assert "processes vote" in promise[1]
        if size == 1:
            assert found[0][0] == pytest.approx(single[0], rel=1e-5)


# -- an exchange with a state


class OneStepLate(Exchange):
    """Use the gradient of the step before in every step."""

    promise, reason = "tolerance", "added up by the library"

    def __init__(self, params: Any, virtual_ranks: int, group: Any) -> None:
        self.params, self.group = params, group
        self.before = [torch.zeros_like(p) for p in params]

    def finish(self, weight: float) -> bool:
        mine = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.params]
        now = [total / weight for total in self.group.all_reduce(mine)]
        for p, grad in zip(self.params, self.before, strict=True):
            p.grad = grad
        self.before = now
        return all(bool(grad.isfinite().all()) for grad in now)

    def state_dict(self) -> dict[str, Any]:
        return {"before": self.before}

    def load_state_dict(self, state: Any) -> None:
        self.before = list(state["before"])


def train_late(run: Run[Any]) -> Any:
    return train_classifier(run, exchange=OneStepLate)


def test_its_state_is_in_the_checkpoint(tmp_path: Path) -> None:
    whole = run_ranks(attempt, 2, tmp_path / "whole", train_late, settings(steps=6))
    run_ranks(attempt, 2, tmp_path / "half", train_late, settings(steps=3))
    resumed = run_ranks(partial(attempt, resume=True), 2, tmp_path / "half", train_late, settings(steps=6))
    assert [found[1] for found in resumed] == [found[1] for found in whole]
    for found in run_ranks(partial(attempt, resume=True), 2, tmp_path / "half", train_classifier, settings(steps=9)):
        assert "begun with OneStepLate" in found
        assert "--accept-change exchange" in found


# -- exchanges that are refused


class Incomplete:
    """An exchange without a promise and without most of the protocol."""

    def __init__(self, params: Any, virtual_ranks: int, group: Any) -> None:
        self.params = params

    def finish(self, weight: float) -> bool:
        return True


class WithoutFinish(Exchange):
    promise, reason = "exact", "nothing"

    def __init__(self, params: Any, virtual_ranks: int, group: Any) -> None:
        self.params = params


def with_exchange(exchange: Any, run: Run[Any]) -> Any:
    model = run.place(linear)
    optimizer = sgd(model)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(Numbers(), exchange=exchange):
        for x, i in step:
            step.backward(loss_of(model, x), weight=len(i))
        step.update(optimizer)


def with_incomplete(run: Run[Any]) -> Any:
    return with_exchange(Incomplete, run)


def without_finish(run: Run[Any]) -> Any:
    return with_exchange(WithoutFinish, run)


def with_number(run: Run[Any]) -> Any:
    return with_exchange(3, run)


class PerfectPromise(class_from_docs("MajorityVote")):  # type: ignore[misc]
    promise = "perfect"


def with_perfect_promise(run: Run[Any]) -> Any:
    return with_exchange(PerfectPromise, run)


REFUSED: list[tuple[Callable[[Run[Any]], Any], Settings, list[str]]] = [
    (
        with_incomplete,
        SETTINGS,
        ["Incomplete is no exchange: it lacks promise and reason and begin", "class Mine(unisono.Exchange)"],
    ),
    (
        with_perfect_promise,
        SETTINGS,
        [
            "PerfectPromise has an unknown promise: 'perfect'",
            "one of 4: 'exact'",
            "promise = 'tolerance'",
        ],
    ),
    (without_finish, SETTINGS, ["WithoutFinish is no exchange: it lacks finish.", "built a WithoutFinish"]),
    (with_number, SETTINGS, ["got an exchange that cannot be called: a int", "pass its class"]),
    (
        train_late,
        replace(SETTINGS, exchange="ring"),
        ["OneStepLate does not work with exchange = ring", "--set exchange=tree"],
    ),
    (
        train_late,
        replace(SETTINGS, compress=CompressSettings(kind="int8")),
        ["compress.kind = int8", "--set compress.kind"],
    ),
    (
        train_late,
        replace(SETTINGS, parallel=ParallelSettings(shard=2, reshard="step")),
        ["OneStepLate does not work with parallel.shard = 2", "whole models"],
    ),
]


@pytest.mark.parametrize(("loop", "config", "wanted"), REFUSED)
def test_unusable_exchanges_are_refused(tmp_path: Path, loop: Any, config: Settings, wanted: list[str]) -> None:
    for found in run_ranks(attempt, 2, tmp_path, loop, config):
        assert all(words in found for words in wanted), found


# -- the script's own collectives


def between_steps(run: Run[Any]) -> Any:
    def after(step: Any, optimizer: Any) -> Any:
        step.update(optimizer)
        return run.collectives.all_gather({"rank": torch.tensor(run.rank)})[-1]["rank"].item()

    return train(run, after=after)


def between_steps_on_one(run: Run[Any]) -> Any:
    """Call a collective on rank 0 while the others begin the next step."""

    def after(step: Any, optimizer: Any) -> None:
        step.update(optimizer)
        if run.is_main:
            run.collectives.all_reduce(torch.ones(3))

    return train(run, after=after)


def after_the_loop_on_one(run: Run[Any]) -> Any:
    """Call a collective on rank 0 while the others evaluate."""
    train(run)
    if run.is_main:
        run.collectives.all_reduce(torch.ones(3))
    else:
        run.evaluate(linear(), Numbers(), lambda output, x, i: (output.sum(), len(i)))


@pytest.mark.parametrize(("loop", "other"), [(between_steps_on_one, "a step"), (after_the_loop_on_one, "run.evaluate")])
def test_a_collective_on_one_process_raises_on_all(tmp_path: Path, loop: Any, other: str) -> None:
    for found in run_ranks(attempt, 2, tmp_path, loop):
        assert "came to" in found
        assert f"1 at {other} and 1 at run.collectives" in found


def in_a_micro_batch(run: Run[Any]) -> Any:
    return train(run, lambda step, model, x, i: run.collectives.barrier())


def test_collectives_are_allowed_between_steps(tmp_path: Path) -> None:
    for found in run_ranks(attempt, 3, tmp_path / "between", between_steps):
        assert found[:-1] == [2, 2, 2]
    for found in run_ranks(attempt, 2, tmp_path / "within", in_a_micro_batch):
        assert "run.collectives was called within a round of step 0" in found


# -- an optimizer


def train_with_lion(run: Run[Any]) -> Any:
    return train_classifier(run, lambda model: class_from_docs("Lion")(model.parameters(), lr=0.003))


def test_a_custom_optimizer_needs_no_change(tmp_path: Path) -> None:
    """The bits are equal on any number of processes, also after a resume on another number."""
    config = settings(steps=12, clip=1.0)
    found = [
        rank_result
        for n in (1, 2, 3)
        for rank_result in run_ranks(attempt, n, tmp_path / str(n), train_with_lion, config)
    ]
    assert {str(rank_result) for rank_result in found} == {str(found[0])}
    assert found[0][0][-1] < found[0][0][0]
    assert found[0][2][0] == "exact"
    run_ranks(attempt, 2, tmp_path / "half", train_with_lion, replace(config, steps=5))
    for rank_result in run_ranks(partial(attempt, resume=True), 3, tmp_path / "half", train_with_lion, config):
        assert rank_result[1] == found[0][1]
