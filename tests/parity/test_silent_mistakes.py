"""Known silent mistakes of distributed training: we make none of them, and each measurement can fail."""

from __future__ import annotations

import pytest

from benchmarks.mistakes.__main__ import page, told
from benchmarks.mistakes.play import play_ddp, play_ours
from benchmarks.mistakes.stage import DDP, MODULES, case

OURS = [(name, size) for name in MODULES for size in case(name).sizes]
BY_HAND = [name for name in MODULES if DDP in case(name).peers and name != "unused"]


@pytest.mark.parametrize(("name", "size"), OURS)
def test_we_do_not_make_it(name: str, size: int) -> None:
    found = play_ours(name, size)
    assert case(name).is_right(found), case(name).told(found)


@pytest.mark.parametrize("name", BY_HAND)
def test_the_loop_by_hand_makes_it(name: str) -> None:
    """Or the measurement could not fail."""
    found = play_ddp(name, 2)
    assert not case(name).is_right(found), case(name).told(found)


def test_a_layer_that_nobody_uses_stays_in_plain_torch_too() -> None:
    assert case("unused").is_right(play_ddp("unused", 2))


def test_what_is_not_there_is_not_measured() -> None:
    peers = dict.fromkeys(case("schedule").peers)
    row = next(line for line in page({"schedule": {"Unisono": [0.5], **peers}}, {}).splitlines() if "schedule" in line)
    assert row.split(" | ")[2:] == ["0.5", "**0.5**", *["not measured"] * 3, "– |"]


def test_figures_on_several_numbers_of_processes_are_told_together() -> None:
    whole, more = {"rows": 101, "mean": 50.0}, {"rows": 102, "mean": 49.51}
    assert told(case("evaluation"), [whole, whole, whole]) == ("101 rows, mean 50.00 on 2, 3, 4", True)
    text = "2: 101 rows, mean 50.00; 3: 101 rows, mean 50.00; 4: 102 rows, mean 49.51"
    assert told(case("evaluation"), [whole, whole, more]) == (text, False)
