"""Loader workers do not change the result, and those that do not start are started again."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import default_collate

from tests import rounding
from tests.ranks import training
from tests.ranks.loops import SETTINGS, Numbers, attempt, train
from unisono.config import LoaderSettings, Settings
from unisono.data import alignment, loader_workers
from unisono.data.loader import Loader, Schedule
from unisono.environment import World
from unisono.plan.assignment import Slot
from unisono.plan.batch_order import BatchOrder
from unisono.testing import run_ranks
from unisono.train.run import Run


def stuck(forks: int) -> None:
    """Make the children of the next `forks` forks hang as CPython's do: before any of their own code runs."""
    parent, left = os.getpid(), [forks]

    def count() -> None:
        left[0] -= 1

    def hang() -> None:
        while left[0] >= 0 and os.getppid() == parent:
            time.sleep(0.1)

    os.register_at_fork(before=count, after_in_child=hang)


def loop(run: Run[Any], forks: int) -> Any:
    if forks:
        loader_workers.START_SECONDS = 0.5
        stuck(forks)
    return train(run, data=Numbers(23))


def losses(world: World, folder: str, forks: int) -> Any:
    config = replace(SETTINGS, loader=LoaderSettings(workers=2 if forks else 0))
    return attempt(world, Path(folder), partial(loop, forks=forks), config)


def draws(world: World, config: Settings, folder: str, stop_after: int | None = None, resume: bool = False) -> Any:
    return training.train(world, "sometimes", config, folder, noise=True, stop_after=stop_after, resume=resume)


@pytest.mark.ci
@pytest.mark.parametrize("virtual_ranks", [1, 8])
def test_data_that_draws_for_some_samples_only_gives_the_same_bits(tmp_path: Path, virtual_ranks: int) -> None:
    """With one virtual rank the generators are one stream, and a fetch that draws seeds it again.

    The loop's own random numbers and its dropout must not depend on the process that fetched.
    """
    found = {}
    for count in (0, 2):
        config = training.settings(virtual_ranks=virtual_ranks, loader=LoaderSettings(workers=count))
        folder = str(tmp_path / str(count))
        (found[count],) = run_ranks(draws, 1, config, folder)
        stopped = str(tmp_path / f"stopped {count}")
        run_ranks(draws, 1, config, stopped, 3)
        (resumed,) = run_ranks(draws, 1, config, stopped, None, True)
        assert resumed["state"] == found[count]["state"]
    assert found[0]["losses"] == found[2]["losses"]
    assert found[0]["state"] == found[2]["state"]


def test_workers_that_hang_at_their_start_are_restarted(tmp_path: Path) -> None:
    """Three of the first four workers hang: one begins, the others are killed; then both begin."""
    plain = run_ranks(losses, 2, str(tmp_path / "plain"), 0)
    assert run_ranks(losses, 2, str(tmp_path / "stuck"), 3) == plain
    assert isinstance(plain[0], list)


@pytest.mark.ci
def test_workers_that_never_start_raise_data_error(tmp_path: Path) -> None:
    for message in run_ranks(losses, 2, str(tmp_path), 100):
        assert "Cannot start 2 loader workers" in message
        assert "--set loader.workers=0" in message


def test_a_worker_whose_parent_dies_before_it_starts_ends() -> None:
    """torch checks the parent only later, so the worker would wait forever."""
    register = loader_workers._Register(1)

    def orphan() -> None:
        register.parent += 1  # the child of another process
        register.report(0)

    child = multiprocessing.get_context("fork").Process(target=orphan)
    child.start()
    child.join(10)
    assert child.exitcode == 1
    assert register.pids() == {0}


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Sample:
    x: Any


TABLE = np.arange(4000, dtype=np.float32)[1:]
BLOCK = torch.arange(4000.0)
KINDS: dict[str, Callable[[int], Any]] = {
    "slices of numpy": lambda i: torch.from_numpy(TABLE[13 * i : 13 * i + 13]),
    "slices of torch": lambda i: BLOCK[13 * i : 13 * i + 13],
    "columns": lambda i: torch.from_numpy(TABLE[13 * i : 13 * i + 130].reshape(10, 13)[:, :3]),
    "transposed": lambda i: torch.from_numpy(TABLE[13 * i : 13 * i + 130].reshape(10, 13)).T,
    "expanded": lambda i: BLOCK[i : i + 1].expand(5),
    "conjugate": lambda i: torch.view_as_complex(BLOCK[2 * i : 2 * i + 20].view(10, 2)).conj(),
    "clips": lambda i: BLOCK[i : i + 120].view(2, 4, 5, 3).permute(0, 3, 1, 2),
    "arrays": lambda i: {"a": TABLE[i : i + 13], "columns": TABLE[i : i + 120].reshape(10, 12)[:, ::2]},
    "turned arrays": lambda i: [TABLE[i : i + 120].reshape(10, 12).T],
    "containers": lambda i: Pair([BLOCK[i : i + 3]], {"b": (Sample(BLOCK[i + 1 : i + 5]), "word")}),
    "sparse": lambda i: torch.sparse_coo_tensor(
        torch.tensor([[0, i % 4]]), BLOCK[i : i + 2], (4,), check_invariants=True
    ),
}


class Kind(torch.utils.data.Dataset[Any]):
    """Samples of one kind."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> Any:
        return KINDS[self.name](i)


def layout(value: Any) -> Any:
    """Return the properties of a batch that a kernel depends on: its offset in 64 bytes, strides, numbers."""
    if isinstance(value, torch.Tensor) and value.is_sparse:
        return layout(value._indices()), layout(value._values())
    if isinstance(value, torch.Tensor):
        bits = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
        return value.data_ptr() % 64, value.stride(), value.is_conj(), bits.tolist()
    if isinstance(value, np.ndarray):
        return value.__array_interface__["data"][0] % 64, value.strides, value.tolist()
    if isinstance(value, dict):
        return {key: layout(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [layout(part) for part in value]
    return layout(value.x) if isinstance(value, Sample) else value


def one(samples: list[Any]) -> Any:
    return samples[0]


def fetched(world: World, mended: bool) -> dict[str, list[Any]]:
    """Return for every kind the batches that the process fetches itself, those of a worker, and those out of turn."""
    if not mended:
        alignment.align = lambda batch: batch
    order, seen = BatchOrder(length=12, batch=4, virtual_ranks=2, micro_batch=1, seed=1), {}
    cpu = torch.device("cpu")
    for name in KINDS:
        for collate in (
            one,
            *([default_collate] if "slices" in name or name in ("clips", "columns", "arrays") else []),
        ):
            by: list[Any] = []
            for count in (0, 1):
                loader = Loader(
                    Kind(name),
                    order,
                    Schedule(((0, 2),)),
                    slot=Slot(0),
                    first=0,
                    last=2,
                    device=cpu,
                    collate=collate,
                    workers=count,
                )
                by.append([(place, layout(batch)) for place, batch in loader])
                loader.close()
            by.append([(place, layout(loader.fetch(place)[1])) for place, _ in by[0]])
            seen[f"{name}, {collate.__name__}"] = by
    return seen


def test_a_worker_delivers_the_batches_of_the_process_itself() -> None:
    (seen,) = run_ranks(fetched, 1, True)
    for name, (here, by_worker, out_of_turn) in seen.items():
        assert here == by_worker == out_of_turn, name


def test_without_alignment_batches_differ() -> None:
    """The run's own check would detect this, if alignment ever failed."""
    (seen,) = run_ranks(fetched, 1, False)
    differ = {name for name, (here, by_worker, _) in seen.items() if here != by_worker}
    assert differ >= {"slices of numpy, one", "turned arrays, one", "conjugate, one"}


class Bags(torch.utils.data.Dataset[Any]):
    """Instances from an array, several of them for each sample."""

    def __init__(self) -> None:
        chance = np.random.RandomState(0)
        self.x = chance.randn(4000, 13).astype(np.float32)
        self.ends = np.cumsum(chance.randint(3, 40, 60))

    def __len__(self) -> int:
        return 53

    def __getitem__(self, i: int) -> Any:
        return torch.from_numpy(self.x[self.ends[i] : self.ends[i + 1]]), torch.tensor([i % 3])


def bags(run: Run[Any], mended: bool) -> Any:
    if not mended:
        alignment.align = lambda batch: batch
    model = run.place(lambda: nn.Sequential(nn.Linear(13, 8), nn.Tanh(), nn.Linear(8, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    data, lines = Bags(), list[Any]()
    for step in run.steps(data, collate_fn=one):
        for x, y in step:
            step.backward(F.cross_entropy(model(x).mean(0, keepdim=True), y, reduction="sum"), weight=1)
        step.update(optimizer)
    for walked in (data, (data[i] for i in range(len(data)))):
        lines.append(run.evaluate(model, walked, loss_of, forward=forward, collate_fn=one))
    lines.append(run.predict(model, data, forward=forward, collate_fn=one).tolist())
    return run.context.state.fingerprint(), lines


def forward(model: nn.Module, batch: Any) -> Any:
    return model(batch[0]).mean(0, keepdim=True)


def loss_of(output: Any, x: Any, y: Any) -> Any:
    return F.cross_entropy(output, y, reduction="sum"), 1


def train_bags(world: World, folder: str, count: int, mended: bool) -> Any:
    config = Settings(batch=8, virtual_ranks=4, micro_batch=1, steps=6, loader=LoaderSettings(workers=count))
    return attempt(world, Path(folder), partial(bags, mended=mended), config)


def test_bags_out_of_an_array_train_to_the_same_bits(tmp_path: Path) -> None:
    (plain,) = run_ranks(train_bags, 1, str(tmp_path / "plain"), 0, True)
    assert isinstance(plain, tuple), plain
    for ranks, count in ((1, 1), (2, 0), (2, 1)):
        for other in run_ranks(train_bags, ranks, str(tmp_path / f"{ranks} {count}"), count, True):
            assert other == plain


@pytest.mark.skipif(not rounding.depends_on_addresses(), reason=rounding.ALIKE)
def test_bags_that_are_not_aligned_show_the_worker(tmp_path: Path) -> None:
    """The kernels of this machine do round by address. Without that, the test above would be meaningless."""
    (here,) = run_ranks(train_bags, 1, str(tmp_path / "here"), 0, False)
    (worker,) = run_ranks(train_bags, 1, str(tmp_path / "worker"), 1, False)
    assert here[0] != worker[0]
