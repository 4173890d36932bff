"""Forwards that inspect their inputs in Python: in a pipeline they take the path of one process, or are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.ranks.loops import Numbers, attempt
from tests.ranks.training import settings
from unisono.config import ParallelSettings
from unisono.parallel.pipeline_parallel.fx_partition import CannotTrace, FxPartition
from unisono.testing import run_ranks
from unisono.train.run import Run


class AsksBatch(nn.Module):
    """Multiply by a factor if `ask` returns true for the batch."""

    def __init__(self, ask: Callable[[Any], Any]) -> None:
        super().__init__()
        self.ask = ask
        self.rows = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.out = nn.Linear(3, 2)

    def forward(self, batch: Any) -> Tensor:
        asked = self.ask(batch)
        x = batch["x"] if isinstance(batch, dict) else batch
        if asked:
            x = x * 2
        for row in self.rows:
            x = row(x)
        out: Tensor = self.out(x)
        return out


@dataclass
class Lines:
    x: Tensor
    mask: Tensor | None = None


def matches(batch: Any) -> bool:
    match batch:
        case {"x": _}:
            return True
        case _:
            return False


ASKS: dict[str, Callable[[Any], Any]] = {
    "isinstance": lambda batch: isinstance(batch, Tensor),
    "a mapping": lambda batch: isinstance(batch, Mapping),
    "class": lambda batch: batch.__class__ is dict,
    "type": lambda batch: type(batch) is dict,
    "is_tensor": torch.is_tensor,
    "match": matches,
    "hasattr": lambda batch: hasattr(batch, "mask"),
    "getattr": lambda batch: getattr(batch, "mask", None) is not None,
    "hash": lambda batch: batch in {1: 2},
    "tree": lambda batch: torch.utils._pytree.tree_leaves(batch),
    "an attribute that may be None": lambda batch: batch.mask is not None,
}


class AsksNothing(nn.Module):
    """Inspect nothing that depends on the batch, except for a default."""

    def __init__(self, ask: Callable[[Any], Any]) -> None:
        super().__init__()
        self.ask = ask
        self.rows = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            x = x * mask
        self.ask(x)
        for row in self.rows:
            x = row(x) if isinstance(row, nn.Linear) and hasattr(row, "weight") else x
        return x.float().view(x.shape[0], -1)


@pytest.mark.parametrize("what", ASKS)
def test_a_forward_that_asks_python_is_not_traced(what: str) -> None:
    class AsksInForward(AsksBatch):
        def forward(self, batch: Any) -> Tensor:
            return super().forward(batch) if self.ask(batch) else self.out(batch)

    for forward in (AsksInForward(ASKS[what]), AsksNothing(ASKS[what])):
        with pytest.raises(CannotTrace):
            FxPartition(forward)


@pytest.mark.parametrize("ask", [lambda x: x.shape, lambda x: x.mean(-1), lambda x: x.T + 1])
def test_a_forward_that_asks_nothing_is_traced(ask: Callable[[Any], Any]) -> None:
    assert [link.name for link in FxPartition(AsksNothing(ask)).links] == ["rows.0", "rows.1", "rows.2"]


def train_on(run: Run[Any], given: Callable[[Any], Any], build: Callable[[], nn.Module]) -> Any:
    model = run.place(build)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    told: list[Any] = []

    def loss(output: Tensor, x: Tensor, i: Tensor) -> tuple[Tensor, int]:
        return output.pow(2).sum(), len(i)

    for step in run.steps(Numbers()):
        step.run(model, loss, forward=lambda model, batch: model(given(batch[0])))
        step.update(optimizer)
        told.append(step.loss)
    return [*told, run.context.state.fingerprint()]


def as_dict(x: Tensor) -> Any:
    return {"x": x}


def dict_or_tensor() -> nn.Module:
    return AsksBatch(ASKS["isinstance"])


@pytest.mark.parametrize("given", [as_dict, torch.abs])
def test_a_pipeline_takes_the_path_of_one_process(tmp_path: Path, given: Any) -> None:
    config, loop = settings(batch=8, virtual_ranks=4, steps=2), partial(train_on, given=given, build=dict_or_tensor)
    (alone,) = run_ranks(attempt, 1, tmp_path / "1", loop, config)
    assert isinstance(alone, list), alone
    assert (
        run_ranks(attempt, 2, tmp_path / "2", loop, replace(config, parallel=ParallelSettings(pipeline=2)))
        == [alone] * 2
    )


class Masked(nn.Module):
    """Compute another layer without a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, batch: Any) -> Tensor:
        x, mask = batch["x"], batch.get("mask")
        x = self.rows[0](x)
        x = self.rows[1](x) if mask is None else self.rows[2](x)
        out: Tensor = self.rows[2](x)
        return out


def test_a_none_in_the_batch_is_refused(tmp_path: Path) -> None:
    config = settings(batch=8, virtual_ranks=4, steps=2, parallel=ParallelSettings(pipeline=2))
    told = run_ranks(attempt, 2, tmp_path, partial(train_on, given=as_dict, build=Masked), config)
    assert all("LoopError" in words or "PeerLostError" in words for words in told), told
    assert any("Masked was called with get = None" in words for words in told), told


class WritesInPlace(nn.Module):
    """Write in place to a mask and to a layer's result, and detach the first layers."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ModuleList(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3)) for _ in range(8))
        self.out = nn.Linear(3, 2)

    def forward(self, batch: Any) -> Tensor:
        x = batch.pop("x")
        mask = torch.ones(x.shape[-1], device=x.device)
        mask.mul_(0.5)
        for number, row in enumerate(self.rows):
            x = row(x * mask)
            held = x
            x += 1
            x = x.detach() if number == 4 else x + held
        out: Tensor = self.out(x)
        return out


@pytest.mark.parametrize("schedule", ["1F1B", "InterleavedZeroBubble"])
def test_in_place_writes_and_detached_layers(tmp_path: Path, schedule: Any) -> None:
    config, loop = settings(batch=8, virtual_ranks=4, steps=2), partial(train_on, given=as_dict, build=WritesInPlace)
    if schedule == "InterleavedZeroBubble" and not hasattr(dist, "all_gather_single"):
        pytest.skip("before torch 2.13 this schedule cannot compute a detached layer's gradient")
    (alone,) = run_ranks(attempt, 1, tmp_path / "1", loop, config)
    assert isinstance(alone, list), alone
    config = replace(config, parallel=ParallelSettings(pipeline=2, schedule=schedule))
    assert run_ranks(attempt, 2, tmp_path / "2", loop, config) == [alone] * 2
