"""World: where a process stands, from our launcher, from torchrun, or alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from unisono import env
from unisono.env import World
from unisono.errors import WorldError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


@pytest.fixture(autouse=True)
def nobody_started_us(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    yield
    env.assign(None)


def test_a_plain_process_is_alone() -> None:
    world = World.current()
    assert (world.rank, world.size, world.store, world.launcher) == (0, 1, None, "python")
    assert world.is_main


def test_torchruns_variables_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    world = World.current()
    assert (world.rank, world.size, world.local_rank, world.local_size) == (3, 4, 1, 2)
    assert (world.store, world.launcher, world.terminal) == ("env://", "torchrun", False)


@pytest.mark.parametrize(
    ("name", "value", "true"),
    [
        ("WORLD_SIZE", None, "WORLD_SIZE is not set."),
        ("RANK", None, "RANK is not set."),
        ("MASTER_PORT", None, "MASTER_PORT is not set."),
        ("RANK", "x", "RANK is 'x', which is not a number of 0 or more."),
        ("RANK", "-1", "RANK is '-1', which is not a number of 0 or more."),
        ("RANK", "4", "Rank 4 of 4, and 1 of 2 on this host, cannot be."),
        ("LOCAL_RANK", "2", "Rank 3 of 4, and 2 of 2 on this host, cannot be."),
    ],
)
def test_variables_that_cannot_be_are_refused_rather_than_training_alone(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str | None, true: str
) -> None:
    for key, given in TORCHRUN.items():
        monkeypatch.setenv(key, given)
    if value is None:
        monkeypatch.delenv(name)
    else:
        monkeypatch.setenv(name, value)
    with pytest.raises(WorldError) as caught:
        World.current()
    assert caught.value.problems[0].true == true
    assert "torchrun" in caught.value.problems[0].do


def test_what_our_launcher_assigned_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    mine = World(rank=2, size=3, launcher="unisono", store="file:///somewhere")
    env.assign(mine)
    assert World.current() is mine


def test_a_started_process_inherits_everything_and_our_own_environment_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    theirs = env.inherited({"OMP_NUM_THREADS": "1"})
    assert theirs["PYTHONPATH"] == "/somewhere"
    assert theirs["OMP_NUM_THREADS"] == "1"
    assert env.variables(["OMP_NUM_THREADS", "PYTHONPATH"]) == {"PYTHONPATH": "/somewhere"}
