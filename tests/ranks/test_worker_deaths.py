"""Killed loader workers are restarted, and the run ends with the bits of an undisturbed one."""

from __future__ import annotations

import inspect
import logging
import multiprocessing
import os
import random
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import get_worker_info

from tests.ranks.loops import SETTINGS, Numbers, attempt, linear, loss_of, sgd
from unisono.config import LoaderSettings
from unisono.data.loader import Loader, Schedule
from unisono.data.loader_workers import deaths
from unisono.environment import World
from unisono.plan.assignment import Slot
from unisono.plan.batch_order import BatchOrder
from unisono.testing import run_ranks, run_result
from unisono.train.run import Run

STEPS = 6


class Kills(Numbers):
    """Numbers with noise. The first `times` fetches of number `at` in a worker kill the worker.

    With `holding`, the worker dies with the lock that a worker of torch takes whenever it asks for work.
    """

    def __init__(self, folder: Path, at: int | None = None, times: int = 1, length: int = 20) -> None:
        super().__init__(length)
        self.folder, self.at, self.times, self.holding = folder, at, times, False

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        if i == self.at and get_worker_info() is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            died = len(list(self.folder.iterdir()))
            if died < self.times:
                (self.folder / str(died)).touch()
                if self.holding:
                    done_event_of_worker()._cond.acquire()
                os.kill(os.getpid(), signal.SIGKILL)
        x, number = super().__getitem__(i)
        return x + 0.1 * torch.randn(3), number


def done_event_of_worker() -> Any:
    """Return the event by which torch tells its workers to end, from the frames of a worker."""
    frame = inspect.currentframe()
    while frame is not None and "done_event" not in frame.f_locals:
        frame = frame.f_back
    assert frame is not None
    return frame.f_locals["done_event"]


def kill_children(count: int | None = None) -> None:
    """Kill this many of this process's workers, or all, and wait until they are dead."""
    children = multiprocessing.active_children()
    assert len(children) == 2, "the training's own, and none that an evaluation has left behind"
    for child in children[:count]:
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join()


def measure(output: torch.Tensor, x: torch.Tensor, i: torch.Tensor) -> Any:
    return output.pow(2).sum(), len(i)


def loop(run: Run[Any], folder: Path, how: str) -> Any:
    train, walked = Kills(folder / "train"), Kills(folder / "walked", length=14)
    if how in ("middle", "twice", "holding a lock"):
        train.at, train.times, train.holding = 9, 2 if how == "twice" else 1, how == "holding a lock"
    if how == "evaluation":
        walked.at, walked.times = 5, 2
    model = run.place(linear)
    optimizer = sgd(model)
    run.track(model=model, optimizer=optimizer)
    results: list[Any] = []
    for step in run.steps(train):
        if how == "first fetch" and step.number == 0:
            kill_children(1)
        for x, i in step:
            step.backward(loss_of(model, x) + 0.01 * torch.randn(()), weight=len(i))
            if how == "all at once" and step.number == 2:
                kill_children()
        step.update(optimizer)
        results.append(step.loss)
        if how == "training's, in an evaluation" and step.number == 3:
            kill_children()
        if how == "nothing left" and step.number == STEPS - 1:
            kill_children()
        if step.number in (1, 3):
            results.append(run.evaluate(model, walked, measure))
    results.append(run.predict(model, walked, forward=lambda m, batch: m(batch[0])).tolist())
    return [run.context.state.fingerprint(), results], run_result(run).get("worker_restarts", 0)


def trained(world: World, folder: str, how: str, count: int, virtual_ranks: int) -> Any:
    loader = LoaderSettings(workers=count)
    config = replace(SETTINGS, steps=STEPS, loader=loader, virtual_ranks=virtual_ranks)
    notes: list[str] = []
    hears = logging.Handler()
    hears.emit = lambda record: notes.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("unisono.data.loader_workers").addHandler(hears)
    found = attempt(world, Path(folder) / "run", partial(loop, folder=Path(folder), how=how), config)
    return found, notes


WAYS = ["first fetch", "middle", "twice", "all at once", "evaluation", "training's, in an evaluation", "nothing left"]
WAYS += ["holding a lock"]
CASES = [(how, 1, 4) for how in WAYS] + [(how, 2, 4) for how in ("middle", "evaluation")] + [("twice", 1, 1)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """Return the result of a run without workers, by its number of virtual ranks."""
    found = {}
    for virtual_ranks in (1, 4):
        folder = str(tmp_path_factory.mktemp("plain"))
        ((found[virtual_ranks], _),) = run_ranks(trained, 1, folder, "undisturbed", 0, virtual_ranks)
    return found


@pytest.mark.parametrize(("how", "ranks", "virtual_ranks"), CASES)
def test_killed_workers_are_restarted(
    tmp_path: Path, plain: dict[int, Any], how: str, ranks: int, virtual_ranks: int
) -> None:
    killed = run_ranks(trained, ranks, str(tmp_path), how, 2, virtual_ranks)
    for found, notes in killed:
        assert isinstance(found, tuple), found
        assert found[0] == plain[virtual_ranks][0]
        assert found[1] >= len(notes)
        assert all("was killed by SIGKILL" in note and "loader.workers=1" in note for note in notes)
    assert any(notes for _, notes in killed) == (how != "nothing left")


def dealt(world: World, death: bool) -> list[Any]:
    """Return the places of a loader whose placement changes after step 2.

    All its workers are killed before and after that, if `death`.
    """
    order, schedule = BatchOrder(length=40, batch=8, virtual_ranks=4, seed=3), Schedule(((0, 2), (2, 4)))
    options: dict[str, Any] = {"slot": Slot(0), "first": 0, "last": 10, "device": torch.device("cpu"), "workers": 2}
    loader = Loader(Numbers(40), order, schedule, **options)
    found: list[Any] = []
    batches = iter(loader)
    for place, (_, numbers) in batches:
        found.append((place, numbers.tolist()))
        if place.virtual_rank == 1 and place.step in (2, 6) and death:
            kill_children()
        if place.step == 2 and place.virtual_rank == 1:
            found.append(loader.horizon)
            schedule.change(loader.horizon, ((0, 3), (3, 4)))
        if place.step == 7 and place.virtual_rank == 0:
            loader.skip(2, batches)  # other processes have computed them
    assert deaths.restarts == (2 if death else 0)
    return found


def test_a_restart_fetches_pending_tasks_exactly_once() -> None:
    (undisturbed,), (killed,) = run_ranks(dealt, 1, False), run_ranks(dealt, 1, True)
    assert killed == undisturbed
    assert {place.virtual_rank for place, _ in filter(lambda each: isinstance(each, tuple), undisturbed)} == {0, 1, 2}


def fetched(world: World, folder: str) -> Any:
    config = replace(SETTINGS, loader=LoaderSettings(workers=2))
    return attempt(world, Path(folder) / "run", partial(deadly, folder=Path(folder)), config)


def deadly(run: Run[Any], folder: Path) -> None:
    model = run.place(linear)
    optimizer = sgd(model)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(Kills(folder / "deaths", at=9, times=1000)):
        for x, i in step:
            step.backward(loss_of(model, x), weight=len(i))
        step.update(optimizer)


def test_a_sample_that_kills_every_worker_ends_the_run(tmp_path: Path) -> None:
    (message,) = run_ranks(fetched, 1, str(tmp_path))
    assert "A loader worker died 4 times in a row" in message
    assert "SIGKILL" in message
    assert "--set loader.workers=0" in message
    assert len(list((tmp_path / "deaths").iterdir())) < 20


class Large(torch.utils.data.Dataset[Any]):
    """Samples that take a while to send: an array through the pipe, a tensor through shared memory."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> Any:
        return torch.full((200, 100), float(i)), [float(i)] * 20_000


def soaked(world: World, kills: int) -> Any:
    order = BatchOrder(length=64, batch=8, virtual_ranks=4, seed=3)
    options: dict[str, Any] = {"slot": Slot(0), "first": 0, "last": 60, "device": torch.device("cpu"), "workers": 2}
    loader = Loader(Large(), order, Schedule(((0, 4),)), collate=lambda samples: samples, **options)
    dice, found = random.Random(7), list[Any]()
    for number, (place, batch) in enumerate(loader):
        found.append((place, [(x.sum().item(), sum(values)) for x, values in batch]))
        if kills and number % 11 == 5:
            kills -= 1
            child = dice.choice(multiprocessing.active_children())
            os.kill(child.pid or 0, signal.SIGKILL)  # while it fetches, or sends
    return found, kills


@pytest.mark.slow
def test_twenty_kills_at_any_moment() -> None:
    (undisturbed,), (killed,) = run_ranks(soaked, 1, 0), run_ranks(soaked, 1, 20)
    assert killed[1] == 0
    assert killed[0] == undisturbed[0]
