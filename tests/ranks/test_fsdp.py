"""A sharded model has the bits of one process."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.pairs import every_pair
from tests.ranks import training
from tests.ranks.loops import Numbers, attempt, linear, loss_of, sgd, train, whole
from tests.ranks.test_several_passes import CONFIG, alternating, together
from tests.ranks.training import settings
from unisono import phases
from unisono.config import ParallelSettings
from unisono.distributed.init import join_process_group as join
from unisono.distributed.process_group import to_local
from unisono.environment import World
from unisono.parallel.fsdp.fsdp import ShardedLayer
from unisono.testing import build_run, close_run, run_ranks
from unisono.train.guarantees.user_errors import explain_dtensor_errors
from unisono.train.run import Run

PLACEMENTS = {
    "two shards": (2, ParallelSettings(shard=2)),
    "three shards": (3, ParallelSettings(shard=3)),
    "two models of two shards": (4, ParallelSettings(shard=2)),
    "three shards, gathered once a step": (3, ParallelSettings(shard=3, reshard="step")),
    "two models of two shards, gathered once a step": (4, ParallelSettings(shard=2, reshard="step")),
    "two shards in the CPU's memory": (2, ParallelSettings(shard=2, offload=True)),
}

CASES: dict[str, dict[str, Any]] = {
    "mlp, clipped": {"clip": 0.2},
    "gpt": {},
    "gpt, several micro-batches": {"batch": 24, "virtual_ranks": 4, "micro_batch": 2},
    "gpt, bf16": {"precision": "bf16"},
}


short = partial(training.train, length=53)
"""53 is prime: the last batch of an epoch is short."""


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Train every case on one process."""
    folder = tmp_path_factory.mktemp("alone")
    return {
        case: run_ranks(short, 1, case.split(",")[0], settings(**changes), str(folder / case))[0]
        for case, changes in CASES.items()
    }


def assert_same(runs: list[dict[str, Any]], single: dict[str, Any]) -> None:
    for run in runs:
        assert run["state"] == single["state"]
        assert run["losses"] == single["losses"]
        assert run["norms"] == single["norms"]
        assert run["result"]["right"] == single["result"]["right"]
        assert run["result"]["promise"] == "exact"


@pytest.mark.parametrize(("placement", "case"), every_pair(PLACEMENTS, CASES))
def test_any_placement_gives_the_bits_of_one_process(
    tmp_path: Path, single: dict[str, dict[str, Any]], case: str, placement: str
) -> None:
    size, parallel = PLACEMENTS[placement]
    config = settings(**CASES[case], parallel=parallel)
    assert_same(run_ranks(short, size, case.split(",")[0], config, str(tmp_path)), single[case])


def test_a_checkpoint_is_loaded_under_any_placement(tmp_path: Path) -> None:
    """Save in mid-epoch under one placement and continue under another, three times."""
    config, folder = settings(clip=0.5), tmp_path / "parts"
    never_stopped = run_ranks(short, 1, "gpt", config, str(tmp_path / "whole"))[0]
    stops = [(2, ParallelSettings(shard=2), 2), (3, ParallelSettings(), 4), (4, ParallelSettings(shard=2), 6)]
    for size, parallel, stop in stops:
        part = partial(short, resume=stop > 2, stop_after=stop)
        run_ranks(part, size, "gpt", replace(config, parallel=parallel), str(folder))
    last = replace(config, parallel=ParallelSettings(shard=3, reshard="step"))
    ended = run_ranks(partial(short, resume=True), 3, "gpt", last, str(folder))[0]
    assert ended["state"] == never_stopped["state"]


class Normed(nn.Sequential):
    """Batch norms in layers and outside of them."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.ReLU()) for _ in range(3)))
        self.append(nn.BatchNorm1d(3))
        self.append(nn.Linear(3, 2))


class Repeated(nn.Module):
    """Call one layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.out = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.rows[1](self.rows[0](self.rows[0](x).relu()).relu()))
        return out


class Attending(nn.Module):
    """Use an input several times, as cross-attention does with the output of an encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x + self.query(x) * torch.sigmoid(self.key(memory)) * self.value(memory) + memory)


class Crossed(nn.Module):
    """An encoder whose output each layer of the decoder gets, and an input that skips layers, as in a U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(3, 5)
        self.encoder = nn.ModuleList(Attending() for _ in range(2))
        self.decoder = nn.ModuleList(Attending() for _ in range(3))
        self.out = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = memory = self.enter(x)
        for layer in self.encoder:
            memory = layer(memory, memory=first)
        for layer in self.decoder:
            first = layer(first, memory)
        return self.out(torch.tanh(first + 3 * memory))


def crossed(run: Run[Any]) -> Any:
    return train(run, build=Crossed, data=Numbers(48))


class Bottleneck(nn.Module):
    """A layer of layers, whose input the first of them and a shortcut get, as in a ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.shortcut = nn.Linear(5, 5)
        self.layer = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.shortcut(x) + self.layer(x))


class Nested(nn.Sequential):
    """Two layers of layers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 5), Bottleneck(), Bottleneck(), nn.Linear(5, 2))


def nested(run: Run[Any]) -> Any:
    return train(run, build=Nested, data=Numbers(48))


@pytest.mark.parametrize("loop", [crossed, nested])
@pytest.mark.parametrize("again", ["none", "full"], ids=["kept", "recomputed"])
@pytest.mark.parametrize("gather", ["layer", "step"])
def test_an_input_of_several_layers_has_the_gradient_of_one_process(
    tmp_path: Path, loop: Any, gather: Any, again: Any
) -> None:
    config = settings(batch=16, virtual_ranks=4, steps=4)
    (found,) = run_ranks(attempt, 1, tmp_path / "alone", loop, config)
    assert isinstance(found, list), found
    sharded = replace(config, parallel=ParallelSettings(shard=2, reshard=gather, activation_checkpoint=again))
    assert run_ranks(attempt, 2, tmp_path / "sharded", loop, sharded) == [found] * 2


def normed(run: Run[Any]) -> Any:
    return train(run, build=Normed, data=Numbers(48))


def repeated(run: Run[Any]) -> Any:
    return train(run, build=Repeated, data=Numbers(48))


@pytest.mark.parametrize(("loop", "gather"), [(normed, "layer"), (normed, "step"), (repeated, "step")])
def test_running_statistics_and_a_layer_that_is_called_twice(tmp_path: Path, loop: Any, gather: Any) -> None:
    config = settings(batch=16, virtual_ranks=4, steps=4)
    (found,) = run_ranks(attempt, 1, tmp_path / "1", loop, config)
    assert isinstance(found, list), found
    for size in (2, 4):
        config = replace(config, parallel=ParallelSettings(shard=2, reshard=gather))
        assert run_ranks(attempt, size, tmp_path / str(size), loop, config) == [found] * size


class Transposed(nn.Module):
    """A weight whose memory is that of a transposed matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(40, 3).t())
        self.out = nn.Linear(40, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out((x @ self.weight).relu())
        return out


def transposed(run: Run[Any]) -> Any:
    def after(step: Any, optimizer: Any) -> float:
        step.update(optimizer, clip=0.05)
        norm: float = step.grad_norm
        return norm

    return train(run, build=Transposed, data=Numbers(48), after=after)


@pytest.mark.parametrize("gather", ["layer", "step"])
def test_norms_do_not_depend_on_how_a_parameter_lies_in_memory(tmp_path: Path, gather: Any) -> None:
    config = settings(batch=16, virtual_ranks=4, steps=6)
    (found,) = run_ranks(attempt, 1, tmp_path / "1", transposed, config)
    assert isinstance(found, list), found
    config = replace(config, parallel=ParallelSettings(shard=2, reshard=gather))
    assert run_ranks(attempt, 2, tmp_path / "2", transposed, config) == [found] * 2


@pytest.mark.parametrize("loop", [together, alternating])
def test_passes_with_a_gradient_each(tmp_path: Path, loop: Any) -> None:
    """Two models called twice in one forward pass, and a gradient of a gradient."""
    config = replace(CONFIG, batch=12, steps=3)
    (found,) = run_ranks(attempt, 1, tmp_path / "1", loop, config)
    assert "Error" not in str(found)
    config = replace(config, parallel=ParallelSettings(shard=2, reshard="step"))
    assert run_ranks(attempt, 2, tmp_path / "2", loop, config) == [found] * 2


def scores(output: torch.Tensor, x: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (output - x.sum(1, keepdim=True)).pow(2).sum(), len(i)


def outputs(run: Run[Any]) -> Any:
    """Evaluate and predict on data sets that do not divide evenly, one of them an iterable."""
    torch.manual_seed(0)
    model = run.place(lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)))
    found: list[Any] = []
    for length in (1, 5, 9, 11):
        data = Numbers(length)
        found.append(run.evaluate(model, data, scores))
        found.append(run.evaluate(model, (data[i] for i in range(length)), scores))
        found.append(run.predict(model, data).tolist())
    return found


@pytest.mark.parametrize(("size", "gather"), [(2, "layer"), (3, "layer"), (2, "step")])
def test_evaluation_and_prediction(tmp_path: Path, size: int, gather: Any) -> None:
    config = settings(batch=8, virtual_ranks=4)
    (found,) = run_ranks(attempt, 1, tmp_path / "1", outputs, config)
    assert isinstance(found, list), found
    config = replace(config, parallel=ParallelSettings(shard=size, reshard=gather))
    assert run_ranks(attempt, size, tmp_path / "n", outputs, config) == [found] * size


class Scaled(nn.Linear):
    """A parameter without a dimension."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.scale = nn.Parameter(torch.tensor(1.0))


def on_main_only(run: Run[Any]) -> Any:
    model = run.place(linear)
    if run.is_main:
        model(torch.zeros(1, 3))
    return run.evaluate(model, Numbers(), scores)


def unknown_layer(run: Run[Any]) -> Any:
    return train(run, build=lambda: nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)))


def scaled(run: Run[Any]) -> Any:
    return train(run, build=Scaled)


def two_dtypes(*, trains: bool) -> nn.Module:
    model = linear()
    model.register_parameter("wide", nn.Parameter(torch.zeros(2, dtype=torch.float64), requires_grad=trains))
    return model


def with_two_dtypes(run: Run[Any]) -> Any:
    return train(run, build=partial(two_dtypes, trains=True))


def with_two_dtypes_later(run: Run[Any]) -> Any:
    """Train a parameter that was frozen when the model was sharded."""

    def body(step: Any, model: nn.Module, x: torch.Tensor, i: torch.Tensor) -> None:
        model.get_parameter("wide").requires_grad_(step.number > 0)
        step.backward(loss_of(model, x), weight=len(i))

    return train(run, body, build=partial(two_dtypes, trains=False))


def sparse(run: Run[Any]) -> Any:
    return train(run, build=lambda: nn.ModuleList([nn.Linear(3, 2), nn.Embedding(20, 2, sparse=True)]))


def hooked(run: Run[Any]) -> Any:
    def build() -> nn.Module:
        model = linear()
        model.get_parameter("weight").register_hook(lambda grad: grad * 2)
        return model

    return train(run, build=build)


def hooked_later(run: Run[Any]) -> Any:
    def make(model: nn.Module) -> Any:
        model.get_parameter("weight").register_hook(lambda grad: grad * 2)
        return torch.optim.SGD(model.parameters(), lr=0.1)

    return train(run, make=make)


def empty(run: Run[Any]) -> Any:
    def build() -> nn.Module:
        model = linear()
        model.register_parameter("spare", nn.Parameter(torch.zeros(0, 2)))
        return model

    return train(run, build=build)


def train_with_penalty(run: Run[Any]) -> Any:
    """Add squares of weights in the script."""

    def body(step: Any, model: nn.Module, x: torch.Tensor, i: torch.Tensor) -> None:
        step.backward(loss_of(model, x) + model.get_parameter("weight").square().sum(), weight=len(i))

    with explain_dtensor_errors(run.settings.parallel):
        return train(run, body)


def train_with_average(run: Run[Any]) -> Any:
    """Copy a model to average its weights."""
    with explain_dtensor_errors(run.settings.parallel):
        return torch.optim.swa_utils.AveragedModel(run.place(lambda: nn.Linear(3, 2)))


class DataDependent(nn.Module):
    """Call a layer that depends on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.out = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.rows[int(x.sum() > 1.5)](x))
        return out


def train_data_dependent(run: Run[Any]) -> Any:
    model = run.place(DataDependent)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    found: list[Any] = []
    for step in run.steps(Numbers()):
        for x, i in step:
            whole(step, model, x, i)
        step.update(optimizer)
        found.append([step.loss, run.evaluate(model, Numbers(13), scores)])
    return [*found, run.predict(model, Numbers(13)).tolist()]


def test_gathered_once_a_step_processes_may_call_different_layers(tmp_path: Path) -> None:
    config = settings(batch=8, virtual_ranks=8, micro_batch=1, steps=3)
    (found,) = run_ranks(attempt, 1, tmp_path / "1", train_data_dependent, config)
    assert isinstance(found, list), found
    config = replace(config, parallel=ParallelSettings(shard=2, reshard="step"))
    assert run_ranks(attempt, 2, tmp_path / "2", train_data_dependent, config) == [found] * 2


class SkipsLayer(DataDependent):
    """Skip a layer for some samples: in its own forward, or in the loss."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        some = bool(x.sum() > 1.5)
        x = self.rows[0](x)
        through = self.rows[1](x) if some or self.where == "loss" else x
        out: torch.Tensor = self.out(through if some else x)
        return out


def train_skipping(run: Run[Any], where: str) -> Any:
    return train(run, build=lambda: SkipsLayer(where))


@pytest.mark.parametrize("gather", ["layer", "step"])
def test_a_layer_whose_output_some_samples_do_not_use(tmp_path: Path, gather: Any) -> None:
    config = settings(batch=8, virtual_ranks=8, micro_batch=1, steps=3)
    (found,) = run_ranks(attempt, 1, tmp_path / "1", partial(train_skipping, where="loss"), config)
    assert isinstance(found, list), found
    config = replace(config, parallel=ParallelSettings(shard=2, reshard=gather))
    assert run_ranks(attempt, 2, tmp_path / "2", partial(train_skipping, where="loss"), config) == [found] * 2


def evaluate_data_dependent(run: Run[Any]) -> Any:
    """Call different layers in evaluations only, and at the end of a pass, where no other gather follows."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
            self.out = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.out(self.rows[0](x))
            return out + self.rows[1](x).sum() if self.training or x[0, 0] > 0 else out

    model = run.place(Late)
    optimizer = sgd(model)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(Numbers()):
        for x, i in step:
            whole(step, model, x, i)
        step.update(optimizer)
        return run.evaluate(model, Numbers(2), scores)
    return None


ONE_SAMPLE_EACH = {"batch": 8, "virtual_ranks": 8, "micro_batch": 1, "steps": 3}

SHARD_2 = ParallelSettings(shard=2)
REFUSED: dict[str, tuple[Any, Any, str]] = {
    "a layer called twice": (
        repeated,
        {},
        "The Linear rows.0 was called twice in one forward pass.*parallel.reshard=step",
    ),
    "a parameter without a dimension": (scaled, {}, "1 of its parameters are single numbers.*scale.*torch.ones"),
    "a layer of two kinds": (
        with_two_dtypes,
        {},
        "one dtype: wide is float64 and weight is float32.*layer_classes=",
    ),
    "a layer of two kinds, later": (
        with_two_dtypes_later,
        {},
        "reduces the gradients.*one dtype: wide is float64 and weight is float32.*layer_classes=",
    ),
    "a gradient hook": (hooked, {}, "weight has a gradient hook.*change p.grad after the rounds"),
    "a gradient hook, later": (hooked_later, {}, "has a gradient hook.*change p.grad after the rounds"),
    "a parameter without elements": (empty, {}, "spare has no elements.*parallel.reshard=step"),
    "a weight outside of its layer": (
        train_with_penalty,
        {},
        "outside of its layer's call.*parallel.reshard=step.*weight_decay",
    ),
    "a copy of the model": (train_with_average, {}, "A placed model was copied.*average = run.place.*parallel.shard=1"),
    "sparse gradients": (sparse, {}, "1 is an embedding with sparse gradients.*parallel.reshard=step"),
    "running statistics over several processes": (normed, {"micro_batch": 2}, "changed buffers.*micro_batch=none"),
    "another layer for other samples": (
        train_data_dependent,
        ONE_SAMPLE_EACH,
        "was to gather the Linear rows.[01]; at that moment, on process .*gather the Linear rows.*reshard=step",
    ),
    "a layer that some samples skip": (
        partial(train_skipping, where="forward"),
        ONE_SAMPLE_EACH,
        "gather the Linear rows.1.*reshard=step",
    ),
    "another layer in an evaluation": (
        evaluate_data_dependent,
        ONE_SAMPLE_EACH,
        "the Linear rows.1.*|gone or silent.*",
    ),
    "a forward pass on the main process": (on_main_only, {}, "1 at run.evaluate and 1 at a forward pass"),
    "a class that the model has not": (
        unknown_layer,
        {"parallel": replace(SHARD_2, layer_classes=["Block"])},
        "no layer of class Block.*Linear",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_unsupported_models_are_refused_on_every_process(tmp_path: Path, what: str) -> None:
    loop, changes, words = REFUSED[what]
    config = settings(**{"batch": 16, "virtual_ranks": 4, "parallel": SHARD_2} | changes)
    found = run_ranks(attempt, 2, tmp_path, loop, config)
    for message in found:
        assert isinstance(message, str), message
        assert re.search(words, message, re.DOTALL), message


def bytes_held(world: World, folder: Path, parallel: ParallelSettings) -> list[int]:
    """Return the bytes of parameters, gradients and optimizer state before an update."""
    with join(world) as group:
        config = settings(steps=1, batch=8, virtual_ranks=8, parallel=parallel)
        run = build_run(config, world, group, folder)
        model = run.place(
            lambda: nn.Sequential(nn.Linear(3, 96), *(nn.Linear(96, 96) for _ in range(4)), nn.Linear(96, 2))
        )
        optimizer = torch.optim.AdamW(model.parameters())
        run.track(model=model, optimizer=optimizer)
        found = [0, 0, 0]
        for step in run.steps(Numbers(64)):
            for x, i in step:
                whole(step, model, x, i)
            for p in model.parameters():
                found[0] += to_local(p).nbytes
                found[1] += to_local(p.grad).nbytes
            step.update(optimizer)
            for state in optimizer.state.values():
                found[2] += sum(to_local(v).nbytes for v in state.values() if v.dim())
        close_run(run)
        return found


def test_memory_is_divided(tmp_path: Path) -> None:
    (single,) = run_ranks(bytes_held, 1, tmp_path, ParallelSettings())
    for size in (2, 4):
        for here in run_ranks(bytes_held, size, tmp_path, ParallelSettings(shard=size)):
            for mine, all_ in zip(here, single, strict=True):
                assert mine <= 1.1 * all_ / size


def gathering(run: Run[Any]) -> Any:
    """Return the phases in which layers are gathered."""
    found, unshard = set(), ShardedLayer.unshard

    def noted(layer: ShardedLayer) -> Any:
        found.add(phases.now())
        return unshard(layer)

    with mock.patch.object(ShardedLayer, "unshard", noted):
        train(run)
    return found


def test_gathering_once_a_step_is_part_of_the_forward_pass(tmp_path: Path) -> None:
    """It is not part of fetching data, which it follows."""
    config = replace(CONFIG, parallel=ParallelSettings(shard=2, reshard="step"))
    for found in run_ranks(attempt, 2, tmp_path, gathering, config):
        assert found == {"forward"}
