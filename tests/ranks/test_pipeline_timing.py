"""Pipelines that are balanced by the time of layers: the stages follow the times, and the bits do not change."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.ranks.loops import Numbers, attempt
from tests.ranks.test_pipeline import UNEVEN, Deep, squares
from tests.ranks.test_pipeline_limits import ChangesBuffer
from unisono.config import ParallelSettings
from unisono.recipes.text import GPT, Model
from unisono.testing import run_promise, run_ranks
from unisono.train.run import Run

PIPELINE = replace(UNEVEN, parallel=ParallelSettings(pipeline=2))


class Uneven(nn.Module):
    """Eight layers of one size: four compute 512 positions, four their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.early = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.late = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.early:
            x = layer(x).relu()
        x = x.mean(1)
        for layer in self.late:
            x = layer(x).relu()
        return x


def layers_held(run: Run[Any], example: Any) -> Any:
    """Return the layers that this process has, and the line that describes the partition."""
    said: list[str] = []
    run.print = lambda *values: said.append(" ".join(map(str, values)))  # type: ignore[method-assign]
    model = run.place(Uneven, example=example)
    return sorted({name.rsplit(".", 1)[0] for name, _ in model.named_parameters()}), said


def by_parameters(run: Run[Any]) -> Any:
    return layers_held(run, None)


def by_time(run: Run[Any]) -> Any:
    return layers_held(run, (torch.randn(4, 512, 64), torch.zeros(4)))


def by_name(run: Run[Any]) -> Any:
    return layers_held(run, {"x": torch.randn(4, 512, 64)})


def test_stages_are_balanced_by_time(tmp_path: Path) -> None:
    (first, said), (second, _) = run_ranks(attempt, 2, tmp_path / "a", by_parameters, PIPELINE)
    assert (len(first), len(second)) == (4, 4)
    assert said == ["pipeline: 2 stages, early.0 to early.3 (50%), late.0 to late.3 (50%), by parameters"]
    for number, loop in enumerate((by_time, by_name)):
        (first, (said,)), (second, _) = run_ranks(attempt, 2, tmp_path / str(number), loop, PIPELINE)
        assert 1 <= len(first) < 4
        assert sorted(first + second) == [f"{row}.{i}" for row in ("early", "late") for i in range(4)]
        assert re.fullmatch(r"pipeline: 2 stages, early.0 to early.\d \(\d+%\), early.\d to late.3 .*, by time", said)
    named = replace(PIPELINE, parallel=ParallelSettings(pipeline=2, split_points=["late.2"]))
    (first, (said,)), _ = run_ranks(attempt, 2, tmp_path / "named", by_time, named)
    assert len(first) == 6
    assert said.endswith("as named (shares by time)")


def train_with_example(run: Run[Any], example: Any) -> Any:
    """Return random numbers after run.place, losses, norms and the fingerprint; with dropout."""
    model = run.place(Deep, example=example)
    found: list[Any] = [torch.rand(3).tolist(), np.random.rand(), random.random()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(Numbers(53)):
        step.run(model, squares)
        found.append((step.loss, step.grad_norm))
        step.update(optimizer)
    return [*found, run_promise(run)[0], run.context.state.fingerprint()]


def without_example(run: Run[Any]) -> Any:
    return train_with_example(run, None)


def with_example(run: Run[Any]) -> Any:
    return train_with_example(run, torch.ones(3, 3))


def unseen(run: Run[Any]) -> Any:
    return train_with_example(run, object())


@pytest.mark.slow
def test_an_example_changes_no_bit(tmp_path: Path) -> None:
    """With dropout, on any number of processes; without a pipeline the example is not used."""
    (alone,) = run_ranks(attempt, 1, tmp_path / "alone", without_example, UNEVEN)
    assert isinstance(alone, list), alone
    assert run_ranks(attempt, 1, tmp_path / "unseen", unseen, UNEVEN) == [alone]
    for size, parallel in (
        (2, ParallelSettings(pipeline=2, activation_checkpoint="full")),
        (2, ParallelSettings(pipeline=2, schedule="ZBVZeroBubble")),
        (4, ParallelSettings(pipeline=2, schedule="Interleaved1F1B")),
    ):
        folder = tmp_path / f"{size}-{parallel.schedule}"
        found = run_ranks(attempt, size, folder, with_example, replace(UNEVEN, parallel=parallel))
        assert found == [alone] * size


def place_with_state(run: Run[Any]) -> Any:
    """Place a model with gradients and a counter, which timing could change."""
    model = nn.Sequential(ChangesBuffer(), nn.Linear(3, 2))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    model[1].eval()
    placed = run.place(model, example=(torch.ones(2, 3),))
    grads = [p.grad is not None and bool((p.grad == 1).all()) for p in placed.parameters()]
    modes = [part.training for part in (model, *model)]
    return all(grads), [float(buffer) for buffer in placed.buffers()], modes


def test_timing_changes_no_gradient_buffer_or_mode(tmp_path: Path) -> None:
    (grads, calls, modes), (others, _, _) = run_ranks(attempt, 2, tmp_path, place_with_state, PIPELINE)
    assert (grads, others, calls, modes[0]) == (True, True, [0.0], True)


def layers_with_tensor(run: Run[Any]) -> Any:
    """Place a model whose matrices two processes share, so they time it together."""
    said: list[str] = []
    run.print = lambda *values: said.append(" ".join(map(str, values)))  # type: ignore[method-assign]
    text = Model(width=16, depth=4, heads=2, context=16)
    model = run.place(lambda: GPT(text), example=(torch.zeros(2, 16, dtype=torch.int64),))
    return said, sorted({name.split(".")[1] for name, _ in model.named_parameters() if name.startswith("blocks.")})


def test_with_tensor_parallelism(tmp_path: Path) -> None:
    config = replace(UNEVEN, parallel=ParallelSettings(pipeline=2, tensor=2))
    found = run_ranks(attempt, 4, tmp_path, layers_with_tensor, config)
    assert all(isinstance(here, tuple) for here in found), found
    (line,) = found[0][0]
    assert line.endswith("by time")
    assert found[0][1] == found[1][1]
    assert found[2][1] == found[3][1]
    assert sorted(found[0][1] + found[2][1]) == ["0", "1", "2", "3"]


def too_wide(run: Run[Any]) -> Any:
    run.place(Deep, example=(torch.ones(2, 7),))


def misnamed(run: Run[Any]) -> Any:
    run.place(Deep, example={"tokens": torch.ones(2, 3)})


def empty_example(run: Run[Any]) -> Any:
    run.place(Deep, example=())


@pytest.mark.parametrize(
    ("loop", "words"),
    [
        (too_wide, "cannot go forward and backward with it: RuntimeError: .*shapes.*2x7.*collate makes it"),
        (misnamed, "cannot go forward.*TypeError: .*'(input|tokens)'"),
        (empty_example, "cannot go forward.*IndexError"),
    ],
)
def test_an_unusable_example_is_refused_on_every_process(
    tmp_path: Path, loop: Callable[[Run[Any]], Any], words: str
) -> None:
    for found in run_ranks(attempt, 2, tmp_path, loop, PIPELINE):
        assert isinstance(found, str), found
        assert re.search(f"Cannot time the layers of Deep with the example.*{words}", found, re.DOTALL), found
