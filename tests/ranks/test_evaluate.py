"""Evaluation and prediction: each sample once, and the same bits on any number of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from tests.ranks.loops import SETTINGS, Numbers, attempt, linear
from unisono.environment import World
from unisono.testing import run_ranks
from unisono.train.run import Run

CONFIG = replace(SETTINGS, batch=16, virtual_ranks=4)


class Noisy(Numbers):
    """Numbers with random noise."""

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        x, i = super().__getitem__(i)
        return x + torch.randn(3), i


class NumberStream(IterableDataset[Any]):
    """An iterable data set without random access or length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        noisy = Noisy(self.length)
        return (noisy[i] for i in range(self.length))


def rows_and_mean(output: torch.Tensor, x: torch.Tensor, i: torch.Tensor) -> dict[str, Any]:
    return {"rows": (torch.tensor(float(len(i))), 1.0), "mean": (i.sum(), len(i)), "output": (output.sum(), len(i))}


def nested_outputs(model: nn.Module, batch: Any) -> dict[str, Any]:
    """Return nested outputs of several types."""
    x, i = batch
    out = model(x)
    return {"out": out, "more": (i, [out.argmax(1) == 1, out[:, :1].bfloat16()], torch.empty(len(i), 0))}


def evaluate_and_predict(run: Run[Any], data: Any) -> Any:
    torch.manual_seed(run.rank)
    model = run.place(linear)
    measured = run.evaluate(model, data, rows_and_mean)
    predicted = run.predict(model, data, forward=nested_outputs)
    before = torch.get_rng_state().sum().item()
    reference = run.predict(model, data)
    assert torch.get_rng_state().sum().item() == before
    numbers, (right, narrow), nothing = predicted["more"]
    assert torch.equal(reference, predicted["out"])
    assert (right.dtype, narrow.dtype, tuple(nothing.shape)) == (torch.bool, torch.bfloat16, (len(numbers), 0))
    return measured, numbers.tolist(), reference.tolist(), right.tolist(), narrow.tolist()


def evaluate_lengths(world: World, folder: str, lengths: list[int]) -> dict[Any, Any]:
    return {
        (kind.__name__, length): attempt(
            world, Path(folder) / f"{kind.__name__}-{length}", partial(evaluate_and_predict, data=kind(length)), CONFIG
        )
        for kind in (Noisy, NumberStream)
        for length in lengths
    }


def test_each_sample_is_used_once_with_the_same_bits(tmp_path: Path) -> None:
    """The data has 101 samples, fewer than processes, or exactly one micro-batch; with and without `__len__`."""
    lengths = [101, 3, 1, 4]
    runs = [
        results
        for size in (1, 2, 3, 4)
        for results in run_ranks(evaluate_lengths, size, str(tmp_path / str(size)), lengths)
    ]
    for (_, length), results in runs[0].items():
        assert isinstance(results, tuple), results
        measured, numbers, *_ = results
        assert numbers == list(range(length))
        assert measured["mean"] == (length - 1) / 2
        assert measured["rows"] == pytest.approx(length / -(-length // 4))
    for run in runs[1:]:
        assert run == runs[0]


def attempt_wrong(run: Run[Any], kind: Callable[[Run[Any], nn.Module], Any]) -> Any:
    return kind(run, run.place(linear))


def wrong_calls(world: World, folder: str) -> dict[str, str]:
    kinds: dict[str, Callable[[Run[Any], nn.Module], Any]] = {
        "empty": (lambda run, model: run.predict(model, NumberStream(0))),
        "empty list": (lambda run, model: run.evaluate(model, [], rows_and_mean)),
        "another length": (lambda run, model: run.evaluate(model, NumberStream(9 + run.rank), rows_and_mean)),
        "a loader": (lambda run, model: run.predict(model, DataLoader(Noisy(9)))),
        "a number": (lambda run, model: run.predict(model, 9)),
        "no rows": (lambda run, model: run.predict(model, Noisy(9), forward=lambda m, b: m(b[0]).sum())),
        "other shapes": (
            lambda run, model: run.predict(model, Noisy(9), forward=lambda m, b: b[0].new_ones(len(b[1]), len(b[1])))
        ),
    }
    return {
        name: attempt(world, Path(folder) / name, partial(attempt_wrong, kind=kind), CONFIG)
        for name, kind in kinds.items()
    }


WORDS = {
    "empty": "ended before its first sample",
    "empty list": "The length of the list is 0",
    "another length": "9 on rank 0, 10 on rank 1",
    "a loader": "loader.dataset and collate_fn",
    "a number": "lacks __len__ or __getitem__",
    "no rows": "one row for each sample",
    "other shapes": r"float32 (1,) and float32 (4,)",
}


def test_wrong_calls_raise_on_each_process(tmp_path: Path) -> None:
    first, second = run_ranks(wrong_calls, 2, str(tmp_path))
    for name, words in WORDS.items():
        assert words in first[name], first[name]
        assert words in second[name] or name == "no rows", second[name]
