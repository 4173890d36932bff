"""The exchange and the optimizer that docs/guide/exchanges/custom.md shows, on real processes."""

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

PAGE = DOCS / "guide" / "exchanges" / "custom.md"


def shown(name: str) -> Any:
    """Return a class as the page defines it."""
    (block,) = [block for block in blocks_of(PAGE) if f"class {name}" in block.code]
    assert len(block.code.splitlines()) < 40
    names: dict[str, Any] = {}
    exec(compile(block.code, block.name, "exec"), names)
    return names[name]


def learn(run: Run[Any], make: Callable[[nn.Module], Any] = sgd, exchange: Any = None) -> Any:
    """Losses, the weights' fingerprint and the promise; of a classifier of points."""
    model = run.place(MLP)
    optimizer = make(model)
    run.track(model=model, optimizer=optimizer)
    losses = []
    for step in run.steps(Points(200), exchange=exchange):
        step.run(model, lambda out, x, y: (nn.functional.cross_entropy(out, y, reduction="sum"), len(y)))
        step.update(optimizer)
        losses.append(step.loss)
    return losses, run.context.state.fingerprint(), run_promise(run)


# -- the vote


def vote(run: Run[Any]) -> Any:
    return learn(run, lambda model: torch.optim.SGD(model.parameters(), lr=0.01), shown("MajorityVote"))


def signs(run: Run[Any]) -> Any:
    """The vote of a single process, by hand: the sign of the whole gradient."""
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


def test_the_exchange_of_the_paper_trains(tmp_path: Path) -> None:
    """On one process it is the sign of the gradient; on several all have the same weights, and it learns."""
    config = settings(steps=30)
    (by_hand,) = run_ranks(attempt, 1, tmp_path / "hand", signs, config)
    for size in (1, 2, 3):
        told = run_ranks(attempt, size, tmp_path / str(size), vote, config)
        for losses, fingerprint, promise in told:
            assert fingerprint == told[0][1]
            assert losses[-1] < 0.7 * losses[0]
            assert promise[0] == "sites are part of the mathematics"
            assert "processes vote" in promise[1]
        if size == 1:
            assert told[0][0] == pytest.approx(by_hand[0], rel=1e-5)


# -- an exchange that carries something


class Late(Exchange):
    """Every step uses the gradient of the step before it."""

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


def late(run: Run[Any]) -> Any:
    return learn(run, exchange=Late)


def test_what_it_carries_is_in_the_checkpoint(tmp_path: Path) -> None:
    whole = run_ranks(attempt, 2, tmp_path / "whole", late, settings(steps=6))
    run_ranks(attempt, 2, tmp_path / "half", late, settings(steps=3))
    resumed = run_ranks(partial(attempt, resume=True), 2, tmp_path / "half", late, settings(steps=6))
    assert [told[1] for told in resumed] == [told[1] for told in whole]
    for told in run_ranks(partial(attempt, resume=True), 2, tmp_path / "half", learn, settings(steps=9)):
        assert "begun with Late" in told
        assert "--accept-change exchange" in told


# -- what does not fit


class Half:
    """Says nothing of what it promises, and does not know the rest of the protocol."""

    def __init__(self, params: Any, virtual_ranks: int, group: Any) -> None:
        self.params = params

    def finish(self, weight: float) -> bool:
        return True


class Endless(Exchange):
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


def lacking(run: Run[Any]) -> Any:
    return with_exchange(Half, run)


def endless(run: Run[Any]) -> Any:
    return with_exchange(Endless, run)


def built(run: Run[Any]) -> Any:
    return with_exchange(3, run)


class Perfect(shown("MajorityVote")):  # type: ignore[misc]
    promise = "perfect"


def perfect(run: Run[Any]) -> Any:
    return with_exchange(Perfect, run)


ONE_BY_ONE: list[tuple[Callable[[Run[Any]], Any], Settings, list[str]]] = [
    (lacking, SETTINGS, ["Half is no exchange: it lacks promise and reason and begin", "class Mine(unisono.Exchange)"]),
    (perfect, SETTINGS, ["Perfect has an unknown promise: 'perfect'", "one of 4: 'exact'", "promise = 'tolerance'"]),
    (endless, SETTINGS, ["Endless is no exchange: it lacks finish.", "built a Endless"]),
    (built, SETTINGS, ["got an exchange that cannot be called: a int", "pass its class"]),
    (late, replace(SETTINGS, exchange="ring"), ["Late does not work with exchange = ring", "--set exchange=tree"]),
    (late, replace(SETTINGS, compress=CompressSettings(kind="int8")), ["compress.kind = int8", "--set compress.kind"]),
    (
        late,
        replace(SETTINGS, parallel=ParallelSettings(shard=2, reshard="step")),
        ["Late does not work with parallel.shard = 2", "whole models"],
    ),
]


@pytest.mark.parametrize(("loop", "config", "wanted"), ONE_BY_ONE)
def test_what_does_not_fit_is_told(tmp_path: Path, loop: Any, config: Settings, wanted: list[str]) -> None:
    for told in run_ranks(attempt, 2, tmp_path, loop, config):
        assert all(words in told for words in wanted), told


# -- the script's own collectives


def between_steps(run: Run[Any]) -> Any:
    def after(step: Any, optimizer: Any) -> Any:
        step.update(optimizer)
        return run.collectives.all_gather({"rank": torch.tensor(run.rank)})[-1]["rank"].item()

    return train(run, after=after)


def between_steps_on_one(run: Run[Any]) -> Any:
    """The others begin the next step."""

    def after(step: Any, optimizer: Any) -> None:
        step.update(optimizer)
        if run.is_main:
            run.collectives.all_reduce(torch.ones(3))

    return train(run, after=after)


def behind_the_loop_on_one(run: Run[Any]) -> Any:
    """The others evaluate."""
    train(run)
    if run.is_main:
        run.collectives.all_reduce(torch.ones(3))
    else:
        run.evaluate(linear(), Numbers(), lambda output, x, i: (output.sum(), len(i)))


@pytest.mark.parametrize(
    ("loop", "other"), [(between_steps_on_one, "a step"), (behind_the_loop_on_one, "run.evaluate")]
)
def test_a_collective_that_one_process_calls_is_told_on_all(tmp_path: Path, loop: Any, other: str) -> None:
    for told in run_ranks(attempt, 2, tmp_path, loop):
        assert "came to" in told
        assert f"1 at {other} and 1 at run.collectives" in told


def within_a_round(run: Run[Any]) -> Any:
    return train(run, lambda step, model, x, i: run.collectives.barrier())


def test_collectives_are_for_between_two_steps(tmp_path: Path) -> None:
    for told in run_ranks(attempt, 3, tmp_path / "between", between_steps):
        assert told[:-1] == [2, 2, 2]
    for told in run_ranks(attempt, 2, tmp_path / "within", within_a_round):
        assert "run.collectives was called within a round of step 0" in told


# -- an optimizer


def lion(run: Run[Any]) -> Any:
    return learn(run, lambda model: shown("Lion")(model.parameters(), lr=0.003))


def test_an_optimizer_of_ones_own_needs_nothing(tmp_path: Path) -> None:
    """The same bits on any number of processes, also when another number goes on."""
    config = settings(steps=12, clip=1.0)
    told = [one for n in (1, 2, 3) for one in run_ranks(attempt, n, tmp_path / str(n), lion, config)]
    assert {str(one) for one in told} == {str(told[0])}
    assert told[0][0][-1] < told[0][0][0]
    assert told[0][2][0] == "exact"
    run_ranks(attempt, 2, tmp_path / "half", lion, replace(config, steps=5))
    for one in run_ranks(partial(attempt, resume=True), 3, tmp_path / "half", lion, config):
        assert one[1] == told[0][1]
