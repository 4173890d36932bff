"""Processes that gather different layers raise an error, at once or before the update."""

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
DIFFERENT = {
    "one layer for another": [[1, 2, 2, 1], [1, 1, 2, 1], [1, 2, 2, 1]],
    "more on one process": [[1, 2], [1, 2, 2], [1, 2]],
    "nothing on one process": [[1], [1], []],
}


def error_of_two_steps(world: World, folder: Path, at_once: bool, layers: list[list[int]]) -> str:
    """Announce this process's layers in two steps, and return the error."""
    with join(world) as group:
        order = GatherOrder(group, at_once=at_once)
        numbers = {name: order.register(f"to gather layer {name}") for name in (1, 2)}
        try:
            for _ in range(2):
                for name in layers[world.rank]:
                    order.check(order.announce(numbers[name]))
                order.end_step()
        except LoopError as error:
            return str(error)
        return ""


@pytest.mark.parametrize("at_once", [True, False])
def test_processes_that_gather_the_same_layers_get_no_error(tmp_path: Path, at_once: bool) -> None:
    assert run_ranks(error_of_two_steps, 3, tmp_path, at_once, SAME) == [""] * 3


@pytest.mark.parametrize("case", DIFFERENT)
def test_a_comparison_at_the_end_raises_on_all_processes(tmp_path: Path, case: str) -> None:
    for message in run_ranks(error_of_two_steps, 3, tmp_path, False, DIFFERENT[case]):
        assert re.search(r"to (gather layer|be done).*to (gather layer|be done).*reshard=step", message, re.DOTALL)


def test_a_comparison_at_once_names_both_layers(tmp_path: Path) -> None:
    messages = run_ranks(error_of_two_steps, 3, tmp_path, True, DIFFERENT["one layer for another"])
    assert "was to gather layer 1; at that moment, on process 0" in messages[1]
    assert "was to gather layer 2; at that moment, on process 1" in messages[0]
    assert "was to gather layer 2; at that moment, on process 1" in messages[2]
