"""Check that Unisono makes none of the known silent mistakes, and that each measurement can detect them."""

from __future__ import annotations

import pytest

from benchmarks.mistakes.__main__ import describe, page
from benchmarks.mistakes.play import play_ddp, play_ours
from benchmarks.mistakes.stage import DDP, MODULES, case

OURS = [(name, size) for name in MODULES for size in case(name).sizes]
BY_HAND = [name for name in MODULES if DDP in case(name).peers and name != "unused"]


@pytest.mark.parametrize(("name", "size"), OURS)
def test_unisono_is_right(name: str, size: int) -> None:
    figure = play_ours(name, size)
    assert case(name).is_right(figure), case(name).describe(figure)


@pytest.mark.parametrize("name", BY_HAND)
def test_plain_ddp_is_wrong(name: str) -> None:
    """The measurement detects the mistake."""
    figure = play_ddp(name, 2)
    assert not case(name).is_right(figure), case(name).describe(figure)


def test_plain_ddp_does_not_move_an_unused_layer() -> None:
    assert case("unused").is_right(play_ddp("unused", 2))


def test_missing_libraries_are_not_measured() -> None:
    peers = dict.fromkeys(case("schedule").peers)
    row = next(line for line in page({"schedule": {"Unisono": [0.5], **peers}}, {}).splitlines() if "schedule" in line)
    assert row.split(" | ")[2:] == ["0.5", "**0.5**", *["not measured"] * 3, "– |"]


def test_equal_figures_are_described_once() -> None:
    right, wrong = {"rows": 101, "mean": 50.0}, {"rows": 102, "mean": 49.51}
    assert describe(case("evaluation"), [right, right, right]) == ("101 rows, mean 50.00 on 2, 3, 4", True)
    text = "2: 101 rows, mean 50.00; 3: 101 rows, mean 50.00; 4: 102 rows, mean 49.51"
    assert describe(case("evaluation"), [right, right, wrong]) == (text, False)
