"""A pipeline that is cut by the time of its layers: there, and with the bits of one that is cut by parameters."""

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
from tests.ranks.test_pipeline_limits import Counts
from unisono.config import ParallelSettings
from unisono.recipes.text import GPT, Model
from unisono.testing import run_promise, run_ranks
from unisono.train.run import Run

PIPED = replace(UNEVEN, parallel=ParallelSettings(pipeline=2))


class Uneven(nn.Module):
    """Eight layers of the same size: four go over 512 positions, four over their mean."""

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


def kept(run: Run[Any], example: Any) -> Any:
    """The layers that this process has, and what the run says of it."""
    said: list[str] = []
    run.print = lambda *values: said.append(" ".join(map(str, values)))  # type: ignore[method-assign]
    model = run.place(Uneven, example=example)
    return sorted({name.rsplit(".", 1)[0] for name, _ in model.named_parameters()}), said


def by_parameters(run: Run[Any]) -> Any:
    return kept(run, None)


def by_time(run: Run[Any]) -> Any:
    return kept(run, (torch.randn(4, 512, 64), torch.zeros(4)))


def by_name(run: Run[Any]) -> Any:
    return kept(run, {"x": torch.randn(4, 512, 64)})


def test_the_cut_is_where_time_says(tmp_path: Path) -> None:
    (first, said), (second, _) = run_ranks(attempt, 2, tmp_path / "a", by_parameters, PIPED)
    assert (len(first), len(second)) == (4, 4)
    assert said == ["pipeline: 2 stages, early.0 to early.3 (50 %), late.0 to late.3 (50 %), by parameters"]
    for number, loop in enumerate((by_time, by_name)):
        (first, (said,)), (second, _) = run_ranks(attempt, 2, tmp_path / str(number), loop, PIPED)
        assert 1 <= len(first) < 4
        assert sorted(first + second) == [f"{row}.{i}" for row in ("early", "late") for i in range(4)]
        assert re.fullmatch(r"pipeline: 2 stages, early.0 to early.\d \(\d+ %\), early.\d to late.3 .*, by time", said)
    named = replace(PIPED, parallel=ParallelSettings(pipeline=2, split_points=["late.2"]))
    (first, (said,)), _ = run_ranks(attempt, 2, tmp_path / "named", by_time, named)
    assert len(first) == 6
    assert said.endswith("as named (shares by time)")


def trained(run: Run[Any], example: Any) -> Any:
    """What generators give after the model is placed, losses, norms and the fingerprint; with dropout."""
    model = run.place(Deep, example=example)
    told: list[Any] = [torch.rand(3).tolist(), np.random.rand(), random.random()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(Numbers(53)):
        step.run(model, squares)
        told.append((step.loss, step.grad_norm))
        step.update(optimizer)
    return [*told, run_promise(run)[0], run.context.state.fingerprint()]


def without(run: Run[Any]) -> Any:
    return trained(run, None)


def with_one(run: Run[Any]) -> Any:
    return trained(run, torch.ones(3, 3))


def unseen(run: Run[Any]) -> Any:
    return trained(run, object())


@pytest.mark.slow
def test_an_example_changes_no_bit(tmp_path: Path) -> None:
    """Of dropout neither, on any number of processes; and without a pipeline nobody looks at it."""
    (alone,) = run_ranks(attempt, 1, tmp_path / "alone", without, UNEVEN)
    assert isinstance(alone, list), alone
    assert run_ranks(attempt, 1, tmp_path / "unseen", unseen, UNEVEN) == [alone]
    for size, parallel in (
        (2, ParallelSettings(pipeline=2, activation_checkpoint="full")),
        (2, ParallelSettings(pipeline=2, schedule="ZBVZeroBubble")),
        (4, ParallelSettings(pipeline=2, schedule="Interleaved1F1B")),
    ):
        folder = tmp_path / f"{size}-{parallel.schedule}"
        told = run_ranks(attempt, size, folder, with_one, replace(UNEVEN, parallel=parallel))
        assert told == [alone] * size


def ready(run: Run[Any]) -> Any:
    """A model with gradients and a counter, which timing would move."""
    model = nn.Sequential(Counts(), nn.Linear(3, 2))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    model[1].eval()
    placed = run.place(model, example=(torch.ones(2, 3),))
    grads = [p.grad is not None and bool((p.grad == 1).all()) for p in placed.parameters()]
    modes = [part.training for part in (model, *model)]
    return all(grads), [float(buffer) for buffer in placed.buffers()], modes


def test_gradients_buffers_and_modes_are_as_before(tmp_path: Path) -> None:
    (grads, calls, modes), (others, _, _) = run_ranks(attempt, 2, tmp_path, ready, PIPED)
    assert (grads, others, calls, modes[0]) == (True, True, [0.0], True)


def divided(run: Run[Any]) -> Any:
    """Two processes share each matrix, so they take the time together."""
    said: list[str] = []
    run.print = lambda *values: said.append(" ".join(map(str, values)))  # type: ignore[method-assign]
    text = Model(width=16, depth=4, heads=2, context=16)
    model = run.place(lambda: GPT(text), example=(torch.zeros(2, 16, dtype=torch.int64),))
    return said, sorted({name.split(".")[1] for name, _ in model.named_parameters() if name.startswith("blocks.")})


def test_beside_tensor_parallel(tmp_path: Path) -> None:
    config = replace(UNEVEN, parallel=ParallelSettings(pipeline=2, tensor=2))
    told = run_ranks(attempt, 4, tmp_path, divided, config)
    assert all(isinstance(here, tuple) for here in told), told
    (line,) = told[0][0]
    assert line.endswith("by time")
    assert told[0][1] == told[1][1]
    assert told[2][1] == told[3][1]
    assert sorted(told[0][1] + told[2][1]) == ["0", "1", "2", "3"]


def too_wide(run: Run[Any]) -> Any:
    run.place(Deep, example=(torch.ones(2, 7),))


def misnamed(run: Run[Any]) -> Any:
    run.place(Deep, example={"tokens": torch.ones(2, 3)})


def nothing_in_it(run: Run[Any]) -> Any:
    run.place(Deep, example=())


@pytest.mark.parametrize(
    ("loop", "words"),
    [
        (too_wide, "cannot go forward and backward with it: RuntimeError: .*shapes.*2x7.*collate makes it"),
        (misnamed, "cannot go forward.*TypeError: .*'(input|tokens)'"),
        (nothing_in_it, "cannot go forward.*IndexError"),
    ],
)
def test_an_example_that_does_not_fit_is_told_on_every_process(
    tmp_path: Path, loop: Callable[[Run[Any]], Any], words: str
) -> None:
    for told in run_ranks(attempt, 2, tmp_path, loop, PIPED):
        assert isinstance(told, str), told
        assert re.search(f"given an example, to cut a Deep by the time.*{words}", told, re.DOTALL), told
