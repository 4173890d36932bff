"""Python attributes that a forward pass changes: equal for any number of processes, and restored by a resume."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks.loops import SETTINGS, Numbers, assert_same_results, attempt, train
from unisono.config import ParallelSettings, Settings
from unisono.environment import World
from unisono.testing import run_promise, run_ranks
from unisono.train.modules.module_attributes import ModuleAttributes
from unisono.train.run import Run


class Largest(nn.Linear):
    """Keeps the largest input, as dynamic RoPE keeps the longest sequence."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.largest: Any = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.largest = max(self.largest, float(x.abs().max()))
        return super().forward(x / self.largest)


class Calls(nn.Module):
    """A submodule with a counter in a list that is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.calls: list[Any] = [0, {"in": 0}]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls[0] += 1
        self.calls[1]["in"] += len(x)
        return self.linear(x) / (self.calls[0] + self.calls[1]["in"])


class Average(nn.Linear):
    """A running average in a tensor that is not a buffer, replaced or changed in place."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__(3, 2)
        self.average, self.in_place = torch.ones(3), in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_place:
            self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
        else:
            self.average = 0.9 * self.average + 0.1 * x.mean(0)
        return super().forward(x - self.average)


class Cached(nn.Linear):
    """A table that is created on first use, and grows when needed."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        need = 1 + int(10 * x.abs().max())
        if self.table is None or len(self.table) < need:
            self.table = torch.arange(need) / need
        return super().forward(x) + self.table.mean()


class LateCounter(nn.Linear):
    """An attribute that changes only after some steps."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if float(x.max()) > 2.2:  # true for few samples
            self.scale = self.scale * 1.5
        return super().forward(x) * self.scale


MODELS: dict[str, Callable[[], nn.Module]] = {
    "the largest input": Largest,
    "a counter in a list": Calls,
    "an average that is replaced": partial(Average, in_place=False),
    "an average that is written to": partial(Average, in_place=True),
    "a cached table": Cached,
    "a late change": LateCounter,
}
CONFIG = replace(SETTINGS, steps=5, batch=8, virtual_ranks=4)


def train_all(world: World, folder: str, names: list[str], enabled: bool = True) -> dict[str, Any]:
    """Train each model, and return losses and fingerprint."""
    ModuleAttributes.enabled = enabled
    results = {}
    for i, name in enumerate(names):
        loop = partial(train, data=Numbers(23), build=MODELS[name])
        results[name] = attempt(world, Path(folder) / str(i), loop, CONFIG)
    return results


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("attributes")
    return [
        results for size in (1, 2, 3) for results in run_ranks(train_all, size, str(folder / str(size)), list(MODELS))
    ]


@pytest.mark.parametrize("name", MODELS)
def test_attributes_do_not_depend_on_the_number_of_processes(runs: list[dict[str, Any]], name: str) -> None:
    assert_same_results(runs, name)


def test_bits_differ_without_attribute_synchronization(tmp_path: Path) -> None:
    names = [name for name in MODELS if name != "a cached table"]
    one, two = (run_ranks(train_all, n, str(tmp_path / str(n)), names, False)[0] for n in (1, 2))
    assert all(one[name] != two[name] for name in ("the largest input", "a counter in a list"))


# -- an evaluation


def range_of(output: torch.Tensor, x: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, int]:
    return output.abs().sum(), len(x)


def evaluate_between(world: World, folder: str, name: str) -> Any:
    def loop(run: Run[Any]) -> Any:
        model = run.place(MODELS[name])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        run.track(model=model, optimizer=optimizer)
        results = []
        for step in run.steps(Numbers(23)):
            for x, _ in step:
                step.backward(model(x).square().sum(), weight=len(x))
            step.update(optimizer)
            results.append(run.evaluate(model, Numbers(31), range_of))
        return [*results, run.context.state.fingerprint()]

    return attempt(world, Path(folder), loop, CONFIG)


@pytest.mark.parametrize("name", ["the largest input", "a counter in a list"])
def test_evaluation_does_not_change_attributes(tmp_path: Path, name: str) -> None:
    one, two, three = (run_ranks(evaluate_between, n, str(tmp_path / str(n)), name) for n in (1, 2, 3))
    assert isinstance(one[0], list), one[0]
    assert all(results == one[0] for results in (*two, *three))


# -- a resume


def stop_and_resume(world: World, folder: str, name: str) -> tuple[Any, Any]:
    loop = partial(train, data=Numbers(23), build=MODELS[name])
    first = attempt(world, Path(folder), loop, replace(CONFIG, steps=2))
    second = attempt(world, Path(folder), loop, CONFIG, resume=True)
    return first, second


@pytest.mark.parametrize("name", ["the largest input", "a counter in a list", "an average that is written to"])
def test_resume_restores_attributes(tmp_path: Path, runs: list[dict[str, Any]], name: str) -> None:
    _, resumed = run_ranks(stop_and_resume, 2, str(tmp_path), name)[0]
    assert resumed[-1] == runs[0][name][-1]


# -- outputs


class RecordsOutputs(nn.Module):
    """Keeps outputs for inspection: with a graph, of varying size, of a custom type."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.loss: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x)
        self.loss = out.square().mean()
        self.weights = torch.softmax(out, 1)
        self.generator = (row for row in x)
        return out + self.loss


def outputs(run: Run[Any]) -> list[Any]:
    model = run.place(RecordsOutputs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run.track(model=model, optimizer=optimizer)
    results = []
    for step in run.steps(Numbers(24)):
        for x, y in step:
            step.backward((model(x) - y[:, None]).square().sum(), weight=len(x))
        step.update(optimizer)
        attributes = run.context.models.buffers.attributes
        results.append([model.loss is not None, attributes.flags["attributes"], attributes.opaque])
    return results


def train_watched(world: World, folder: str) -> Any:
    return attempt(world, Path(folder), outputs, CONFIG)


def test_outputs_are_not_sent(tmp_path: Path) -> None:
    for results in run_ranks(train_watched, 2, str(tmp_path)):
        assert isinstance(results, list), results
        assert [there for there, _, _ in results] == [True] * 5
        assert not any(sent for _, sent, _ in results[2:])
        assert results[-1][2] == []


# -- values that cannot be sent


class Dice(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 2)
        self.dice = random.Random(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.dice.random()


class Swaps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if float(x.max()) > 1.0:
            old, self.linear = self.linear, nn.Linear(3, 2)
            self.linear.weight, self.linear.bias = old.weight, old.bias
        out: torch.Tensor = self.linear(x)
        return out


def train_refused(world: World, folder: str) -> tuple[Any, Any]:
    def promised(run: Run[Any]) -> Any:
        train(run, data=Numbers(23), build=Dice)
        return run_promise(run)

    swaps = partial(train, data=Numbers(23), build=Swaps)
    return attempt(world, Path(folder) / "0", promised, CONFIG), attempt(world, Path(folder) / "1", swaps, CONFIG)


def test_attributes_that_cannot_be_sent_are_named(tmp_path: Path) -> None:
    for size in (1, 2):
        for promise, error in run_ranks(train_refused, size, str(tmp_path / str(size))):
            assert promise[0] == "tolerance"
            assert "the model (Dice) changes its attribute dice, a Random" in promise[1]
            assert "the model (Swaps) replaced its module linear" in error


class Recurrent(nn.Module):
    """An RNN, whose attributes torch changes when fully_shard marks it."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.RNN(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.rnn(x[:, None])[0][:, 0])
        return out


def saved_attributes(run: Run[Any]) -> Any:
    train(run, build=Recurrent)
    return run.context.models.buffers.attributes.state_dict()["attributes"]


@pytest.mark.parametrize("gather", ["layer", "step"])
def test_attributes_of_fully_shard_are_not_saved(tmp_path: Path, gather: Any) -> None:
    config = replace(SETTINGS, parallel=ParallelSettings(shard=2, reshard=gather))
    assert run_ranks(attempt, 2, tmp_path, saved_attributes, config) == [{}, {}]


class Initialized(nn.Linear):
    """Divides by its first input (data-dependent initialization)."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.first: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first is None:
            self.first = float(x.abs().max())
        return super().forward(x / (1 + self.first))


class NotesOutput(nn.Linear):
    """Keeps an output for inspection."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.seen: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = float(x.abs().max())
        return super().forward(x)


def with_several_micro_batches(world: World, folder: Path, config: Settings) -> Any:
    """Train with three micro-batches per virtual rank, and return the promise."""

    def loop(run: Run[Any], build: Any) -> Any:
        return train(run, build=build)[-1], run_promise(run)

    return [
        attempt(world, folder / b.__name__, partial(loop, build=b), config) for b in (Largest, Initialized, NotesOutput)
    ]


def test_promise_excludes_attributes_carried_between_micro_batches(tmp_path: Path) -> None:
    """Each process computes only some micro-batches of a virtual rank."""
    config = replace(SETTINGS, batch=18, virtual_ranks=3, micro_batch=2, steps=4)
    (reference,) = run_ranks(with_several_micro_batches, 1, tmp_path / "alone", config)
    assert [promise[0] for _, promise in reference] == ["exact"] * 3
    by_step = replace(config, parallel=ParallelSettings(shard=2, reshard="step"))
    for found in run_ranks(with_several_micro_batches, 2, tmp_path / "step", by_step):
        assert [(sha, promise[0]) for sha, promise in found] == [(sha, "exact") for sha, _ in reference]
    by_layer = replace(config, parallel=ParallelSettings(shard=2))
    for largest, initialized, noted in run_ranks(with_several_micro_batches, 2, tmp_path / "layer", by_layer):
        for name, promise in (("largest", largest[1]), ("first", initialized[1])):
            assert promise[0] == "tolerance"
            assert f"changes its attribute {name}" in promise[1]
            assert "parallel.reshard=step" in promise[1]
        assert noted == (reference[2][0], ("exact", noted[1][1]))


class ReadsLate(nn.Linear):
    """Writes an attribute that looks like an output, and reads it from the third step on."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.last: Any = None
        self.steps: torch.Tensor
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 1 + float(self.last) if float(self.steps) > 2 else 1.0
        self.last = float(x.abs().max())
        self.steps += 1
        return super().forward(x / scale)


@pytest.mark.parametrize("size", [1, 2])
def test_output_that_is_read_later_lowers_the_promise(tmp_path: Path, size: int) -> None:
    for promise, reason in run_ranks(train_reads_late, size, tmp_path):
        assert promise == "tolerance"
        assert "changes its attribute last" in reason


def train_reads_late(world: World, folder: Path) -> Any:
    def loop(run: Run[Any]) -> Any:
        train(run, build=ReadsLate)
        return run_promise(run)

    return attempt(world, folder, loop, replace(SETTINGS, steps=5))
