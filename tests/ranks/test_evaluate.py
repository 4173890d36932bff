"""Evaluation and prediction: every sample once, on any number of processes, with the bits of one."""

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
    """Numbers with noise that is drawn when they are fetched."""

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        x, i = super().__getitem__(i)
        return x + torch.randn(3), i


class Stream(IterableDataset[Any]):
    """The same without random access or a length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        noisy = Noisy(self.length)
        return (noisy[i] for i in range(self.length))


def rows_and_mean(output: torch.Tensor, x: torch.Tensor, i: torch.Tensor) -> dict[str, Any]:
    return {"rows": (torch.tensor(float(len(i))), 1.0), "mean": (i.sum(), len(i)), "output": (output.sum(), len(i))}


def several(model: nn.Module, batch: Any) -> dict[str, Any]:
    """Several outputs of several kinds, nested."""
    x, i = batch
    out = model(x)
    return {"out": out, "more": (i, [out.argmax(1) == 1, out[:, :1].bfloat16()], torch.empty(len(i), 0))}


def look(run: Run[Any], data: Any) -> Any:
    torch.manual_seed(run.rank)
    model = run.place(linear)
    measured = run.evaluate(model, data, rows_and_mean)
    predicted = run.predict(model, data, forward=several)
    before = torch.get_rng_state().sum().item()
    alone = run.predict(model, data)
    assert torch.get_rng_state().sum().item() == before
    numbers, (right, narrow), nothing = predicted["more"]
    assert torch.equal(alone, predicted["out"])
    assert (right.dtype, narrow.dtype, tuple(nothing.shape)) == (torch.bool, torch.bfloat16, (len(numbers), 0))
    return measured, numbers.tolist(), alone.tolist(), right.tolist(), narrow.tolist()


def looks(world: World, folder: str, lengths: list[int]) -> dict[Any, Any]:
    return {
        (kind.__name__, length): attempt(
            world, Path(folder) / f"{kind.__name__}-{length}", partial(look, data=kind(length)), CONFIG
        )
        for kind in (Noisy, Stream)
        for length in lengths
    }


def test_every_sample_once_with_the_bits_of_one_process(tmp_path: Path) -> None:
    """101 samples, fewer than there are processes, and exactly one micro-batch: with and without a length."""
    lengths = [101, 3, 1, 4]
    runs = [told for size in (1, 2, 3, 4) for told in run_ranks(looks, size, str(tmp_path / str(size)), lengths)]
    for (_, length), told in runs[0].items():
        assert isinstance(told, tuple), told
        measured, numbers, *_ = told
        assert numbers == list(range(length))
        assert measured["mean"] == (length - 1) / 2
        assert measured["rows"] == pytest.approx(length / -(-length // 4))
    for run in runs[1:]:
        assert run == runs[0]


def broken(run: Run[Any], kind: Callable[[Run[Any], nn.Module], Any]) -> Any:
    return kind(run, run.place(linear))


def breaches(world: World, folder: str) -> dict[str, str]:
    kinds: dict[str, Callable[[Run[Any], nn.Module], Any]] = {
        "empty": (lambda run, model: run.predict(model, Stream(0))),
        "empty list": (lambda run, model: run.evaluate(model, [], rows_and_mean)),
        "another length": (lambda run, model: run.evaluate(model, Stream(9 + run.rank), rows_and_mean)),
        "a loader": (lambda run, model: run.predict(model, DataLoader(Noisy(9)))),
        "a number": (lambda run, model: run.predict(model, 9)),
        "no rows": (lambda run, model: run.predict(model, Noisy(9), forward=lambda m, b: m(b[0]).sum())),
        "other shapes": (
            lambda run, model: run.predict(model, Noisy(9), forward=lambda m, b: b[0].new_ones(len(b[1]), len(b[1])))
        ),
    }
    return {
        name: attempt(world, Path(folder) / name, partial(broken, kind=kind), CONFIG) for name, kind in kinds.items()
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


def test_what_cannot_be_walked_through_is_told_on_every_process(tmp_path: Path) -> None:
    first, second = run_ranks(breaches, 2, str(tmp_path))
    for name, words in WORDS.items():
        assert words in first[name], first[name]
        assert words in second[name] or name == "no rows", second[name]
