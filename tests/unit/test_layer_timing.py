"""Measured costs of links: they are positive, and measuring them changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ranks.training import TinyGPT
from tests.unit.test_fx_partition import Skips
from tests.unit.test_shadow_partition import Branches
from unisono.parallel.pipeline_parallel.fx_partition import FxPartition
from unisono.parallel.pipeline_parallel.layer_timing import (
    ROUNDS,
    WARM_UPS,
    clock_of,
    seconds_of_links,
    seconds_of_modules,
)
from unisono.parallel.pipeline_parallel.shadow_partition import ShadowPartition
from unisono.parallel.precision import autocast
from unisono.train.pipelining.stage_timing import describe_stages

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread, as in a run: several threads wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def seconds_of(model: nn.Module, x: Tensor, precision: str = "fp32") -> tuple[FxPartition, list[float]]:
    partition = FxPartition(model)
    return partition, seconds_of_links(
        model, partition, partition.bind((x,), {}), clock_of(CPU, shared=False), autocast(precision, CPU)
    )


class Overwriting(nn.Sequential):
    """Overwrite the input, the result of a layer, and a value that is kept for later."""

    def __init__(self) -> None:
        super().__init__(nn.ReLU(inplace=True), nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        kept = self[1](self[0](x))
        out: Tensor = self[3](self[2](kept) * 2) + kept
        return out


class Pairs(nn.Module):
    """Return two values from the first layer, of which one is used after the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.GRU(3, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        both = self.first(x)
        h = self.second(both[0])
        return {"out": self.out(h), "state": both[1]}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["TinyGPT", "Skips", "Overwriting", "Pairs"])
def test_unusual_models_are_timed_and_do_not_change(name: str, precision: str) -> None:
    """Cover lookups, tied, frozen and unused weights, layers that are called twice, in-place operators and tuples."""
    models: dict[str, Any] = {"TinyGPT": TinyGPT, "Skips": Skips, "Overwriting": Overwriting, "Pairs": Pairs}
    model = models[name]()
    x = torch.randint(0, 23, (3, 9)) if name == "TinyGPT" else torch.randn(2, 5, 4 if name == "Skips" else 3)
    before, given = copy.deepcopy(model.state_dict()), x.clone()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with torch.no_grad():  # the caller's mode does not matter
        partition, seconds = seconds_of(model, x, precision)
    assert len(seconds) == len(partition.links)
    assert all(second > 0 for second in seconds)
    assert torch.equal(x, given)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(p.grad is not None and bool((p.grad == 1).all()) for p in model.parameters())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_model_that_cannot_be_traced_is_timed_module_by_module(precision: str) -> None:
    model, x = Branches(), torch.rand(2, 5, 4)
    partition, before = ShadowPartition(model, "a test"), copy.deepcopy(model.state_dict())
    seconds = seconds_of_modules(
        model, partition.links, (x,), {}, clock_of(CPU, shared=False), autocast(precision, CPU)
    )
    assert len(seconds) == len(partition.links) == 6
    assert all(second > 0 for second in seconds)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_backward_is_timed_where_parameters_train() -> None:
    layers = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    hooked: list[str] = []
    for name, p in layers.named_parameters():
        p.register_hook(lambda _, name=name: hooked.append(name))
    layers[1].requires_grad_(False)
    seconds_of(layers, torch.randn(2, 4))
    assert hooked == ["0.weight", "2.weight"] * (WARM_UPS + ROUNDS)


def test_a_layer_that_is_called_twice_costs_twice() -> None:
    model = Skips()
    assert [link.cost for link in FxPartition(model).links if link.name == "rows.0"] == [42, 0]
    partition, seconds = seconds_of(model, torch.randn(2, 5, 4))
    partition.set_times(seconds)
    assert all(link.cost > 0 for link in partition.links)


def test_the_partition_is_described_in_a_line() -> None:
    partition = FxPartition(nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 8, bias=False)))
    assert describe_stages(partition, [0, 2], named=False) == "pipeline: 2 stages, 0 to 1 (33%), 2 (67%), by parameters"
    partition.set_times([2e-3, 1e-3, 1e-3])
    assert describe_stages(partition, [0, 2], named=False) == "pipeline: 2 stages, 0 to 1 (75%), 2 (25%), by time"
    assert describe_stages(partition, [0, 2], named=True).endswith("2 (25%), as named (shares by time)")
