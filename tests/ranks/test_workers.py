"""Loader workers change nothing; and those that never begin are started again, as if nothing had happened."""

from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import training
from tests.ranks.loops import SETTINGS, Numbers, attempt, train
from unisono.data import workers
from unisono.env import World
from unisono.settings import LoaderSettings, Settings
from unisono.testing import run_ranks
from unisono.train.run import Run


def stuck(forks: int) -> None:
    """From now on the children of the next so many forks hang, as CPython's do: before anything of theirs runs."""
    parent, left = os.getpid(), [forks]

    def count() -> None:
        left[0] -= 1

    def hang() -> None:
        while left[0] >= 0 and os.getppid() == parent:
            time.sleep(0.1)

    os.register_at_fork(before=count, after_in_child=hang)


def loop(run: Run[Any], forks: int) -> Any:
    if forks:
        workers.PATIENCE_SECONDS = 0.5
        stuck(forks)
    return train(run, data=Numbers(23))


def losses(world: World, folder: str, forks: int) -> Any:
    config = replace(SETTINGS, loader=LoaderSettings(workers=2 if forks else 0))
    return attempt(world, Path(folder), partial(loop, forks=forks), config)


def draws(world: World, config: Settings, folder: str, stop_after: int | None = None, resume: bool = False) -> Any:
    return training.train(world, "sometimes", config, folder, noise=True, stop_after=stop_after, resume=resume)


@pytest.mark.parametrize("virtual_ranks", [1, 8])
def test_data_that_draws_for_some_samples_only_is_the_same_for_everybody(tmp_path: Path, virtual_ranks: int) -> None:
    """With one virtual rank the generators are one stream, which a fetch that draws begins anew: the loop's own draws
    and its dropout must not show who fetched."""
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


def test_workers_that_hang_are_started_again(tmp_path: Path) -> None:
    """Three of the first four: one begins, the others are killed; then both begin."""
    plain = run_ranks(losses, 2, str(tmp_path / "plain"), 0)
    assert run_ranks(losses, 2, str(tmp_path / "stuck"), 3) == plain
    assert isinstance(plain[0], list)


def test_workers_that_never_begin_are_told(tmp_path: Path) -> None:
    for told in run_ranks(losses, 2, str(tmp_path), 100):
        assert "2 loader workers were to begin" in told
        assert "--set loader.workers=0" in told


def test_a_worker_whose_process_is_gone_before_it_begins_goes_too() -> None:
    """Else it would wait for work for ever: torch's own look at the parent begins later."""
    register = workers._Register(1)

    def orphan() -> None:
        register.parent += 1  # somebody else's child
        register.arrived(0)

    child = multiprocessing.get_context("fork").Process(target=orphan)
    child.start()
    child.join(10)
    assert child.exitcode == 1
    assert register.pids() == {0}
