"""One model over several devices of a process. The CPU serves as several devices; an accelerator is one more."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.ranks.loops import Numbers, attempt, train
from tests.ranks.training import settings
from tests.ranks.training import train as train_kind
from unisono.config import ParallelSettings
from unisono.errors import LoopError
from unisono.parallel.one_process.device_map import (
    CurrentDevice,
    apply_device_map,
    assign_layers,
    parts_of,
    size_of,
    tied_groups,
)
from unisono.recipes.text import GPT, Model
from unisono.testing import run_ranks
from unisono.train.run import Run

CPU, META = torch.device("cpu"), torch.device("meta")


class Stack(nn.Module):
    """Rows with modules before, between and after them; a tied head; a parameter and a buffer of its own."""

    shift: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.ones(3))
        self.register_buffer("shift", torch.full((3,), 0.5))
        self.first = nn.Linear(3, 4)
        self.rows = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.2)) for _ in range(4))
        self.last = nn.Linear(3, 4)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.first(x * self.offset + self.shift)
        for row in self.rows:
            x = row(x)
        return {"out": self.last(x[:, :3])[:, :2]}


def total(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = model(x)
    loss: torch.Tensor = ((out["out"] if isinstance(out, dict) else out) - x.sum(1, keepdim=True)).pow(2).sum()
    return loss


def stacked(run: Run[Any]) -> Any:
    return train(run, lambda step, model, x, i: step.backward(total(model, x), len(i)), build=Stack, data=Numbers(48))


CONFIG = settings(batch=16, virtual_ranks=4, steps=3, clip=0.5)
TWO = ParallelSettings(model_parallel_devices=2, devices=["cpu", "cpu"])


@pytest.mark.parametrize("changes", [{}, {"virtual_ranks": 1}])
def test_the_bits_are_those_of_one_device(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = replace(CONFIG, **changes)
    (told,) = run_ranks(attempt, 1, tmp_path / "one", stacked, config)
    assert isinstance(told, list), told
    for name, parallel in {"two": TWO, "again": replace(TWO, activation_checkpoint="full")}.items():
        split = replace(config, parallel=parallel)
        assert run_ranks(attempt, 1, tmp_path / name, stacked, split) == [told]
    if not changes:
        config = replace(CONFIG, parallel=replace(TWO, model_parallel_devices=3, devices=["cpu"] * 3))
        assert run_ranks(attempt, 2, tmp_path / "three, on two processes", stacked, config) == [told] * 2


def test_a_checkpoint_is_loaded_under_another_placement(tmp_path: Path) -> None:
    """The run changes from a device map to shards and back. Without rows, the parts are in the order of the model."""
    config, folder = settings(), str(tmp_path / "parts")
    (never_stopped,) = run_ranks(train_kind, 1, "gpt", config, str(tmp_path / "whole"))
    for size, parallel, stop in [(1, TWO, 2), (2, ParallelSettings(shard=2), 4), (1, TWO, None)]:
        part = partial(train_kind, resume=stop != 2, stop_after=stop)
        ended = run_ranks(part, size, "gpt", replace(config, parallel=parallel), folder)[0]
    assert ended["state"] == never_stopped["state"]
    assert ended["result"]["promise"] == "exact"


def test_tied_parts_are_on_one_device() -> None:
    model = Stack()
    rows = list(model.rows)
    assert list(parts_of(model, rows)) == [model.first, *rows, model.last]
    assert tied_groups(parts_of(model, rows)) == [[model.first, model.last], *([row] for row in rows)]
    assert size_of([model.first, model.last]) == 4 * (12 + 4 + 4), "what is tied counts once"
    first, second, third = (nn.Linear(2, 2) for _ in range(3))
    third.weight, third.bias = first.weight, second.bias
    assert tied_groups(iter([first, second, third])) == [[first, second, third]]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=7), st.integers(1, 4))
def test_the_largest_share_is_as_small_as_possible(sizes: list[int], count: int) -> None:
    count = min(count, len(sizes))
    found = assign_layers(sizes, count)
    assert found == sorted(found)
    assert set(found) == set(range(count)), "nobody is left without"

    def least(start: int, devices: int) -> int:
        if devices == 1:
            return sum(sizes[start:])
        return min(
            max(sum(sizes[start:end]), least(end, devices - 1)) for end in range(start + 1, len(sizes) - devices + 2)
        )

    assert max(sum(s for s, d in zip(sizes, found, strict=True) if d == n) for n in range(count)) == least(0, count)


def test_more_devices_than_parts_are_refused() -> None:
    with pytest.raises(LoopError, match=r"(?s)has 2 parts.*--set parallel\.model_parallel_devices=2"):
        apply_device_map(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)), [CPU] * 3, CPU, [])


class MixesDevices(Stack):
    """Combine tensors of two devices."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        raise RuntimeError("Expected all tensors to be on the same device, but found at least two devices")


def test_tensors_of_two_devices_raise_a_helpful_error() -> None:
    model = MixesDevices()
    apply_device_map(model, [CPU, CPU], CPU, [])
    with pytest.raises(
        LoopError, match=r"(?s)MixesDevices, divided over 2 devices.*same device.*parallel\.layer_classes"
    ):
        model(torch.zeros(2, 3))


def test_a_copy_is_another_model() -> None:
    model = Stack()
    apply_device_map(model, [CPU, CPU], CPU, [])
    copied = copy.deepcopy(model)
    assert copied.state_dict().keys() == Stack().state_dict().keys()
    hooks = [hook for part in copied.modules() for hook in part._forward_pre_hooks.values()]
    (where,) = {hook.args[0] for hook in hooks}  # type: ignore[attr-defined]  # a partial
    assert isinstance(where, CurrentDevice)
    assert where is copied.forward.current  # type: ignore[attr-defined]
    assert where is not model.forward.current  # type: ignore[attr-defined]


def test_activations_are_moved_to_each_part() -> None:
    """A move back needs a second device with data; for the other direction the meta device is enough."""
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    apply_device_map(model, [CPU, META], META, [])
    assert [p.device.type for p in model.parameters()] == ["cpu"] * 4 + ["meta"] * 4
    where: list[str] = []
    for part in model:
        part.register_forward_hook(lambda part, inputs, out: where.append(f"{inputs[0].device} {out.device}"))
    assert model(torch.zeros(2, 3)).device == META
    assert where == ["cpu cpu"] * 2 + ["meta meta"] * 2


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator beside the CPU")
def test_tensors_travel_between_devices() -> None:
    here = torch.device(torch.accelerator.current_accelerator() or CPU)
    tokens, model = torch.randint(0, 256, (2, 16)), GPT(Model(width=16, depth=4, heads=2))
    expected = model(tokens)
    expected.sum().backward()
    grads = [p.grad for p in model.parameters()]
    model.zero_grad()
    apply_device_map(model, [CPU, here], CPU, [])
    assert {p.device.type for p in model.parameters()} == {"cpu", here.type}
    out = model(tokens)
    out.sum().backward()
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-4)
    for p, grad in zip(model.parameters(), grads, strict=True):
        assert p.grad is not None
        torch.testing.assert_close(p.grad.cpu(), grad, rtol=1e-3, atol=1e-3)
