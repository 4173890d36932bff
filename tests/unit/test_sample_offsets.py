"""Where the samples of a shard are, as columns and as a JSON value."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest

from unisono.data.streaming.sample_offsets import LineOffsets, TarOffsets


def tar_offsets() -> TarOffsets:
    offsets = TarOffsets(problem="There is no tar header at byte 9.")
    offsets.add("a/1", [("jpg", 512, 700), ("cls", 2048, 1)])
    offsets.add("ü", [("txt", 3072, 2**40)])
    offsets.add("empty", [])
    return offsets


def test_offsets_are_the_same_after_a_file() -> None:
    offsets = tar_offsets()
    assert [offsets.sample(number) for number in range(len(offsets))] == [
        ("a/1", ["jpg", "cls"], array("q", [512, 2048]), array("q", [700, 1])),
        ("ü", ["txt"], array("q", [3072]), array("q", [2**40])),
        ("empty", [], array("q"), array("q")),
    ]
    assert TarOffsets.from_json(json.loads(json.dumps(offsets.as_json()))) == offsets
    lines = LineOffsets()
    lines.add(0, 7)
    lines.add(9, 9)
    assert LineOffsets.from_json(json.loads(json.dumps(lines.as_json()))) == lines
    assert list(lines) == [(0, 7), (9, 9)]
    assert len(TarOffsets.from_json(TarOffsets().as_json())) == len(LineOffsets.from_json(LineOffsets().as_json())) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"keys": ["a/1", "b"]},
        {"keys": ["a/1", "b", 3]},
        {"keys": None},
        {"ends": [2, 3, 4]},
        {"ends": [3, 2, 3]},
        {"ends": [2, 3, 3.0]},
        {"names": ["jpg", "cls"]},
        {"extensions": [0, 1, -1]},
        {"extensions": [0, 1]},
        {"begins": [512, 2048, -3]},
        {"begins": [512, 2048, 2**63]},
        {"begins": [512, 2048, "3"]},
        {"begins": "ends"},
        {"begins": [512, 1000, 3072]},
        {"sizes": [700, 1]},
        {"problem": None},
    ],
    ids=str,
)
def test_other_values_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"it has|a column"):
        TarOffsets.from_json({**tar_offsets().as_json(), **change})


@pytest.mark.parametrize(
    "value", [[], None, {}, {"begins": [1, 2], "ends": [1]}, {"begins": [3], "ends": [1]}], ids=str
)
def test_other_values_are_no_lines(value: Any) -> None:
    with pytest.raises(ValueError, match=r"it has|a column"):
        LineOffsets.from_json(value)
