"""Notes: processes that do not gather the same layers hear of it, at once or before anything is updated."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from unisono.distributed.init import join_process_group as join
from unisono.environment import World
from unisono.errors import LoopError
from unisono.parallel.fsdp.gather_order import GatherOrder
from unisono.testing import run_ranks

SAME = [[1, 2, 2, 1]] * 3
OTHERWISE = {
    "one layer for another": [[1, 2, 2, 1], [1, 1, 2, 1], [1, 2, 2, 1]],
    "more on one process": [[1, 2], [1, 2, 2], [1, 2]],
    "nothing on one process": [[1], [1], []],
}


def steps(world: World, folder: Path, at_once: bool, writes: list[list[int]]) -> str:
    """Two steps in which this process writes what stands there for it; what it is told."""
    with join(world) as group:
        notes = GatherOrder(group, at_once=at_once)
        numbers = {name: notes.number(f"to gather layer {name}") for name in (1, 2)}
        try:
            for _ in range(2):
                for name in writes[world.rank]:
                    notes.read(notes.write(numbers[name]))
                notes.end()
        except LoopError as error:
            return str(error)
        return ""


@pytest.mark.parametrize("at_once", [True, False])
def test_who_does_the_same_hears_nothing(tmp_path: Path, at_once: bool) -> None:
    assert run_ranks(steps, 3, tmp_path, at_once, SAME) == [""] * 3


@pytest.mark.parametrize("what", OTHERWISE)
def test_what_is_compared_at_the_end_is_told_to_all(tmp_path: Path, what: str) -> None:
    for told in run_ranks(steps, 3, tmp_path, False, OTHERWISE[what]):
        assert re.search(r"to (gather layer|be done).*to (gather layer|be done).*reshard=step", told, re.DOTALL), told


def test_at_once_all_hear_of_another_layer(tmp_path: Path) -> None:
    told = run_ranks(steps, 3, tmp_path, True, OTHERWISE["one layer for another"])
    assert "was to gather layer 1; at that moment, on process 0" in told[1]
    assert "was to gather layer 2; at that moment, on process 1" in told[0]
    assert "was to gather layer 2; at that moment, on process 1" in told[2]
