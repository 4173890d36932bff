"""Micro-batches that a function computes, and batches of similar length, have the same bits on any placement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks.elastic import ElasticProcesses, die_at
from tests.ranks.loops import SETTINGS, Numbers, attempt, loss_of, results_on_sizes, sgd
from unisono.config import LoaderSettings, Settings
from unisono.data.computed_batches import IndexDataset
from unisono.distributed.init import join_process_group as join
from unisono.environment import World
from unisono.testing import build_run, close_run, finish_run, run_ranks
from unisono.train.run import Run

CONFIG = replace(SETTINGS, steps=6, batch=8, virtual_ranks=4)


class Rollouts:
    """A model that learns, and a copy of it that makes the points, with noise, at the beginning of a step."""

    def __init__(self, run: Run[Any]) -> None:
        self.model = run.place(lambda: nn.Linear(3, 2))
        self.actor = run.place(lambda: nn.Linear(3, 2).requires_grad_(False))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02)
        self.calls: list[range] = []
        run.track(model=self.model, actor=self.actor, optimizer=self.optimizer)

    def play(self, numbers: range) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.append(numbers)
        with torch.no_grad():
            moved = self.actor(torch.randn(len(numbers), 3)) + torch.rand(len(numbers), 1)
        return torch.cat((moved, torch.full((len(numbers), 1), numbers[0] / 50)), 1), torch.tensor(list(numbers))

    def train(self, run: Run[Any]) -> Any:
        """Make three passes over the points of each step, with an update after each."""
        results: list[Any] = []
        for step in run.steps(self.play):
            self.actor.load_state_dict(self.model.state_dict())
            for _ in range(3):
                for x, numbers in step.over(self.optimizer):
                    step.backward(loss_of(self.model, x + 0.01 * torch.randn(len(x), 3)), weight=len(x))
                    step.add("numbers", numbers.sum())
                step.update(self.optimizer)
                results.append((step.loss, step.sum("numbers")))
        return [*results, run.context.state.fingerprint()]


def rollouts(run: Run[Any]) -> Any:
    found = Rollouts(run)
    results = found.train(run)
    assert [total for _, total in results[:-1]] == [sum(range(8 * (n // 3), 8 * (n // 3) + 8)) for n in range(18)]
    assert len(found.calls) == len(set(found.calls)), "a micro-batch is computed once a step"
    return results


def by_length(run: Run[Any]) -> Any:
    """Train on samples of several lengths, in batches of similar length."""
    model = run.place(lambda: nn.Linear(3, 2))
    optimizer = sgd(model)
    run.track(model=model, optimizer=optimizer)
    numbers: list[int] = []
    for step in run.steps(Numbers(23), lengths=[7 - i % 7 for i in range(23)]):
        for x, i in step:
            step.add("lengths", (7 - i % 7).double().var(correction=0) * len(i), len(i))
            step.add("numbers", i.sum())
            step.backward(loss_of(model, x), weight=len(i))
        step.update(optimizer)
        assert run.settings.virtual_ranks == 1 or step.samples < 8 or step.mean("lengths") < 1
        numbers.append(int(step.sum("numbers")))
    assert sum(numbers[:3]) == sum(numbers[3:]) == sum(range(23)), "an epoch has each sample once"
    return run.context.state.fingerprint()


LOOPS: dict[str, Callable[[Run[Any]], Any]] = {"rollouts": rollouts, "by length": by_length}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one virtual rank": {"virtual_ranks": 1},
    "with a loader worker": {"loader": LoaderSettings(workers=1), "micro_batch": 1},
}


def run_loops(world: World, folder: str) -> dict[str, Any]:
    return {
        f"{name}, {case}": attempt(world, Path(folder) / f"{name} {case}", loop, replace(CONFIG, **changes))
        for name, loop in LOOPS.items()
        for case, changes in CASES.items()
        if world.size == 1 or changes.get("virtual_ranks") != 1
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results_on_sizes(run_loops, tmp_path_factory.mktemp("computed"))


@pytest.mark.ci
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", LOOPS)
def test_bits_do_not_depend_on_the_number_of_processes(runs: list[dict[str, Any]], name: str, case: str) -> None:
    found = [results[f"{name}, {case}"] for results in runs if f"{name}, {case}" in results]
    assert "Error" not in str(found[0]), found[0]
    assert found == [found[0]] * len(found)


def refused(world: World, folder: str) -> list[str]:
    def steps(*data: Any, **more: Any) -> Callable[[Run[Any]], Any]:
        return lambda run: next(run.steps(*data, **more))

    wrong = [
        (steps(lengths=[1, 2]), CONFIG),
        (steps(Numbers(5), lengths=[1, 2]), CONFIG),
        (steps(Numbers(2), lengths=[1, 2], shuffle=False), CONFIG),
        (lambda run: next(run.steps(Numbers(2), lengths=[1, run.rank])), CONFIG),
        (steps(len), replace(CONFIG, steps=None, epochs=2)),
    ]
    return [attempt(world, Path(folder) / str(i), loop, config) for i, (loop, config) in enumerate(wrong)]


def test_wrong_requests_are_refused_on_all_processes(tmp_path: Path) -> None:
    first, second = run_ranks(refused, 2, str(tmp_path))
    assert first == second
    words = (
        "group this data by length",
        "2 lengths for 5 samples",
        "shuffle=False",
        "same on every process",
        "epochs=2",
    )
    for message, expected in zip(first, words, strict=True):
        assert expected in message


def test_sample_numbers_need_no_worker() -> None:
    assert IndexDataset(4).micro_batch(3, [1, 2]) == range(13, 15)


@pytest.mark.slow
@pytest.mark.parametrize("times", [2, 5, 9, 12])
def test_others_compute_the_micro_batches_of_a_process_that_died(tmp_path: Path, times: int) -> None:
    """Also in the middle of a step, when the model has learned from them."""
    config = replace(CONFIG, steps=8)
    expected = run_ranks(dying, 1, config, tmp_path / "alone", {})[0]
    with ElasticProcesses(dying, 3, config, tmp_path / "run", {1: ("exchange", times)}) as processes:
        processes.killed = {1}
        assert processes.results() == {0: expected, 2: expected}


def dying(world: World, config: Settings, folder: Path, deaths: dict[int, tuple[str, int]]) -> Any:
    with join(world) as group:
        if world.number in deaths:
            die_at(*deaths[world.number])
        run = build_run(config, world, group, folder, verified=True)
        Rollouts(run).train(run)
        finish_run(run)
        close_run(run)
        return run.context.state.fingerprint()
