"""Errors and calls on only one process are reported on all processes, without a hang."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import get_worker_info

from tests.ranks.loops import SETTINGS, Loop, Numbers, attempt, linear, sgd, train, whole
from unisono.config import LoaderSettings
from unisono.environment import World
from unisono.errors import DataError
from unisono.testing import finish_run, run_ranks
from unisono.train.run import Run
from unisono.train.step import Step

# -- errors of one process


class Fails(Numbers):
    """A data set in which sample 9, in the last step, raises or ends its process."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        if i == 9:
            if self.how in ("exits", "is killed"):
                assert get_worker_info() is not None
                os._exit(3) if self.how == "exits" else os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "ends":
                raise IndexError("list index out of range")
            if self.how == "is damaged":
                raise DataError("Number 9 is damaged.", "It is 9.", "remove it.")
            raise ValueError("number 9 is not readable")
        return super().__getitem__(i)


def fetch_failing(world: World, folder: str, how: str, workers: int) -> Any:
    config = replace(SETTINGS, loader=LoaderSettings(workers=workers))
    return attempt(world, Path(folder), lambda run: train(run, data=Fails(how)), config, verified=True)


PLACE = r"step [012], virtual rank \d"
NOTE = r"while fetching the samples 9 of step 2, virtual rank 3\n$"


@pytest.mark.parametrize(
    ("how", "workers", "words"),
    [
        ("raises", 0, rf"ValueError: number 9 is not readable\n{NOTE}"),
        ("raises", 1, rf"ValueError: Caught ValueError in .* not readable\n\n?{NOTE}"),
        (
            "is damaged",
            1,
            rf"^unisono.errors.DataError: Number 9 is damaged\.\n  It is 9\.\n  Next: remove it\.\n{NOTE}",
        ),
        ("ends", 0, rf"IndexError: list index out of range\n{NOTE}"),
        ("exits", 1, rf"DataError: A loader worker died 4 times in a row.*{PLACE} on\..*loader\.workers=0"),
        ("is killed", 1, rf"DataError: A loader worker died 4 times in a row.*{PLACE} on\..*loader\.workers=0"),
    ],
)
@pytest.mark.parametrize("size", [1, 2])
def test_failed_sample_is_named(tmp_path: Path, size: int, how: str, workers: int, words: str) -> None:
    results = run_ranks(fetch_failing, size, str(tmp_path), how, workers)
    theirs = [end for end in results if not re.search(words, end, re.DOTALL)]
    assert len(theirs) == size - 1, results
    for end in theirs:
        assert re.match(
            r"unisono\.errors\.PeerLostError: .* failed: a process of the run is gone.*--resume", end, re.DOTALL
        ), end


# -- calls on only some processes


def evaluate_on_one_rank(run: Run[Any]) -> Any:
    model = run.place(linear)
    optimizer = sgd(model)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(Numbers()):
        for x, i in step:
            whole(step, model, x, i)
        step.update(optimizer)
        if run.is_main:
            run.evaluate(model, Numbers(), lambda out, x, i: (out.sum(), len(i)))
    return None


def leave_on_one_rank(run: Run[Any]) -> Any:
    def after(step: Step, optimizer: Any) -> None:
        step.update(optimizer)
        if run.rank == 1:
            raise StopIteration

    try:
        train(run, after=after)
    except StopIteration:
        finish_run(run)


ELSEWHERE: dict[str, tuple[Loop, str]] = {
    "an evaluation": (evaluate_on_one_rank, "1 at a step and 1 at run.evaluate.*on every process"),
    "the end": (leave_on_one_rank, "1 at a step and 1 at the script's end"),
    "a place": (lambda run: run.place(linear) if run.is_main else train(run), "1 at"),
    "a first": (lambda run: run.first().__enter__() if run.is_main else train(run), "1 at"),
    "other data": (
        lambda run: train(run, data=Numbers(20 + run.rank)),
        "DataError: The training set must be the same.*20 on rank 0, 21 on rank 1.*no DistributedSampler",
    ),
    "other data to evaluate": (
        lambda run: run.evaluate(run.place(linear), Numbers(9 - run.rank), lambda out, x, i: (out.sum(), 1)),
        "DataError: The data set of run.evaluate must be the same.*9 on rank 0, 8 on rank 1",
    ),
}


def run_different_calls(world: World, folder: str) -> dict[str, Any]:
    def as_script(loop: Loop) -> Loop:
        def script(run: Run[Any]) -> None:
            loop(run)
            finish_run(run)

        return script

    return {name: attempt(world, Path(folder, name), as_script(loop)) for name, (loop, _) in ELSEWHERE.items()}


def test_different_calls_raise_on_all_processes(tmp_path: Path) -> None:
    for results in run_ranks(run_different_calls, 2, str(tmp_path)):
        for name, (_, words) in ELSEWHERE.items():
            assert isinstance(results[name], str), name
            assert re.search(words, results[name], re.DOTALL), results[name]


def raise_on_one_rank(world: World, folder: str) -> Any:
    def body(step: Step, model: nn.Module, x: torch.Tensor, i: torch.Tensor) -> None:
        if world.rank == 1 and step.number == 1:
            raise ZeroDivisionError("of rank 1 alone")
        whole(step, model, x, i)

    return attempt(world, Path(folder), lambda run: train(run, body))


def test_error_on_one_process_is_reported_to_the_others(tmp_path: Path) -> None:
    results = run_ranks(raise_on_one_rank, 3, str(tmp_path))
    assert results[1] == "ZeroDivisionError: of rank 1 alone\n"
    for end in (results[0], results[2]):
        assert "PeerLostError: Step 1's exchange failed: a process" in end
