"""Unsupported models and loops are refused in a pipeline, and no process waits for another one that has ended."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from tests.ranks.loops import Numbers, attempt, linear, whole
from tests.ranks.loops import train as train_linear
from tests.ranks.test_pipeline import UNEVEN, Deep, squares, train_deep
from tests.ranks.training import settings
from unisono.config import ParallelSettings
from unisono.errors import LoopError
from unisono.testing import run_promise, run_ranks
from unisono.train.run import Run


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


class ReadsTensor(nn.Module):
    """Branch on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        out: Tensor = self.second(x if x.sum() > 0 else -x)
        return out


class ChangesBuffer(nn.Linear):
    """Change a buffer in forward."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("calls").add_(1)
        return super().forward(x)


def single() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.Tanh())


def flat_end() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2), nn.Tanh())


def rows() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))


def plain_loop(run: Run[Any]) -> Any:
    return train_linear(run, whole, build=rows)


def passes(run: Run[Any]) -> Any:
    model = run.place(rows)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in run.steps(Numbers()):
        step.run(model, squares, over=[optimizer])


def call_twice(run: Run[Any]) -> Any:
    model = run.place(rows)
    for step in run.steps(Numbers()):
        step.run(model, squares, forward=lambda model, batch: model(batch[0]) + model(batch[0]))


def call_never(run: Run[Any]) -> Any:
    model = run.place(rows)
    for step in run.steps(Numbers()):
        step.run(model, squares, forward=lambda model, batch: batch[0])


def place_two(run: Run[Any]) -> Any:
    return run.place(rows), run.place(linear)


def call_part(run: Run[Any]) -> Any:
    model = run.place(cast(Callable[[], nn.Sequential], rows))
    return model[2](torch.ones(1, 3)), model[0](torch.ones(1, 3))


def train_built(build: Callable[[], nn.Module]) -> Callable[[Run[Any]], Any]:
    def loop(run: Run[Any]) -> Any:
        return train_deep(run, build)

    loop.__qualname__ = loop.__name__ = f"with_{build.__name__}"
    globals()[loop.__name__] = loop
    return loop


PIPELINE = ParallelSettings(pipeline=2)
REFUSED: dict[str, tuple[Any, ParallelSettings, str]] = {
    "batch norm": (train_built(Normed), PIPELINE, "Its 1 is a BatchNorm1d.*GroupNorm"),
    "more stages than layers": (train_built(single), PIPELINE, "chain of 2.*1 have parameters.*parallel.pipeline=1"),
    "no row at all": (train_built(linear), PIPELINE, "chain of 0 modules"),
    "more stages than layers, looped": (
        plain_loop,
        ParallelSettings(pipeline=2, schedule="LoopedBFS"),
        "of which 2 have parameters.*parallel.pipeline=2; or, where a process has several.*1F1B",
    ),
    "a name that is none": (
        plain_loop,
        replace(PIPELINE, split_points=["4"]),
        r"parallel.split_points = \['4'\] does not give 2 stages.*in which Sequential calls them: 1, 2",
    ),
    "a stage without parameters": (
        train_built(flat_end),
        replace(PIPELINE, split_points=["2"]),
        "Stage 1 would have no parameter",
    ),
    "a plain loop": (plain_loop, PIPELINE, "was iterated over.*parallel.pipeline=2.*step.run"),
    "a pass": (passes, PIPELINE, "began a pass.*step.run"),
    "two models": (place_two, PIPELINE, "after a Sequential.*one model"),
}
ON_SOME_RANKS = {
    "a forward that looks into tensors": (
        train_built(ReadsTensor),
        "reads values of what first of stage 0 computes|PeerLostError",
    ),
    "two calls": (call_twice, "called twice for one micro-batch|PeerLostError"),
    "no call": (call_never, "did not call the model|PeerLostError"),
    "another stage's module": (call_part, "was called by itself.*stage [01]"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_pipeline_does_not_support_is_refused_on_every_process(tmp_path: Path, what: str) -> None:
    loop, parallel, words = REFUSED[what]
    for found in run_ranks(attempt, 2, tmp_path, loop, settings(batch=8, virtual_ranks=4, parallel=parallel)):
        assert isinstance(found, str), found
        assert re.search(words, found, re.DOTALL), found


@pytest.mark.parametrize("what", ON_SOME_RANKS)
def test_an_error_on_one_process_ends_the_others(tmp_path: Path, what: str) -> None:
    loop, words = ON_SOME_RANKS[what]
    found = run_ranks(attempt, 2, tmp_path, loop, settings(batch=8, virtual_ranks=4, parallel=PIPELINE))
    assert all(isinstance(message, str) and re.search(words, message, re.DOTALL) for message in found), found
    assert not all("PeerLostError" in message for message in found), found


def train_counting(run: Run[Any]) -> Any:
    return train_deep(run, lambda: nn.Sequential(ChangesBuffer(), nn.Linear(3, 2)))


def test_buffers_that_forward_changes_are_refused(tmp_path: Path) -> None:
    for found in run_ranks(attempt, 2, tmp_path, train_counting, settings(batch=8, virtual_ranks=4, parallel=PIPELINE)):
        assert isinstance(found, str), found
        assert "changed buffers" in found


class DecidesInPython(nn.Module):
    """Let Python decide something between modules: dropout by mode, or random numbers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.rows = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.out = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Any:
        for row in self.rows:
            x = nn.functional.dropout(row(x).tanh(), 0.3, self.training) if self.kind == "drops" else row(x)
            if self.kind == "draws":
                x = x + 0.1 * torch.randn(3)
        return self.out(x)


def train_and_evaluate(run: Run[Any], kind: str) -> Any:
    """Return losses, an evaluation after each step, predictions and the promise."""
    model = run.place(lambda: DecidesInPython(kind))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    found: list[Any] = []
    for step in run.steps(Numbers()):
        step.run(model, squares)
        step.update(optimizer)
        found.append([step.loss, run.evaluate(model, Numbers(9), squares)])
    return [*found, run.predict(model, Numbers(9)).tolist(), run_promise(run)[0]]


@pytest.mark.parametrize("kind", ["drops", "draws"])
def test_a_forward_that_decides_in_python_decides_in_every_pass(tmp_path: Path, kind: str) -> None:
    config = settings(batch=8, virtual_ranks=4, steps=3)
    (alone,) = run_ranks(attempt, 1, tmp_path / "1", partial(train_and_evaluate, kind=kind), config)
    assert isinstance(alone, list), alone
    piped = replace(config, parallel=PIPELINE)
    assert run_ranks(attempt, 2, tmp_path / "2", partial(train_and_evaluate, kind=kind), piped) == [alone] * 2


def train_thawing(run: Run[Any]) -> Any:
    """Freeze the first half, then the second, then nothing, and then everything."""
    model = run.place(Deep)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    found: list[Any] = []
    for step in run.steps(Numbers(53)):
        for name, p in model.named_parameters():
            p.requires_grad_(step.number == 2 or (int(name.partition(".")[0]) > 4) is (step.number == 0))
            p.requires_grad_(p.requires_grad and step.number < 3)
        try:
            step.run(model, squares)
        except LoopError as error:
            return [*found, str(error), run.context.state.fingerprint()]
        norm = step.grad_norm
        step.update(optimizer)
        found.append([step.loss, norm])
    return found


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_a_stage_may_be_frozen_for_some_steps(tmp_path: Path, schedule: Any) -> None:
    (alone,) = run_ranks(attempt, 1, tmp_path / "1", train_thawing, UNEVEN)
    assert isinstance(alone, list), alone
    assert "none of the parameters needs a gradient" in alone[3]
    config = replace(UNEVEN, parallel=ParallelSettings(pipeline=2, schedule=schedule))
    assert run_ranks(attempt, 2, tmp_path / "2", train_thawing, config) == [alone] * 2
