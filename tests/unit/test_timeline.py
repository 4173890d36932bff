"""The timeline: a line for each step, readable after a crash; its errors do not stop training."""

from __future__ import annotations

import errno
import json
import os
from fractions import Fraction
from math import inf
from pathlib import Path

import numpy as np
import pytest

from unisono.monitor import timeline
from unisono.monitor.timeline import Timeline, as_number
from unisono.train.state.run_result import plain


class Hands:
    def __init__(self) -> None:
        self.at = 1_760_000_000.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "timeline" / "rank-0.jsonl"


def test_each_step_has_a_line(path: Path) -> None:
    hands = Hands()
    line = Timeline(path, now=hands)
    line.step(0, {"data": 0.25, "forward": 0.000123456}, 2.5)
    hands.at += 1.5
    line.step(1, {}, None, {"lr": 3e-4, "name": 'a "quoted" ö', "flag": True, "none": None})
    line.close()
    line.close()
    assert [json.loads(text) for text in path.read_text().splitlines()] == [
        {"step": 0, "t": 1_760_000_000.0, "us": [0, 250_000, 123], "loss": 2.5},
        {
            "step": 1,
            "t": 1_760_000_001.5,
            "us": [],
            "log": {"lr": 3e-4, "name": 'a "quoted" ö', "flag": True, "none": None},
        },
    ]
    assert [entry["seconds"] for entry in timeline.read(path)] == [{"data": 0.25, "forward": 0.000123}, {}]


def test_further_fields_of_a_line(path: Path) -> None:
    line = Timeline(path, now=Hands())
    line.step(7, {"other": 0.5}, 1.0, steps=3, wait=0.25, more={"samples": 24, "lr": 0.1})
    line.close()
    (entry,) = timeline.read(path)
    assert entry == {
        "step": 7,
        "t": 1_760_000_000.0,
        "seconds": {"other": 0.5},
        "n": 3,
        "wait": 0.25,
        "loss": 1.0,
        "samples": 24,
        "lr": 0.1,
    }


def test_numbers_that_are_not_finite_are_strings(path: Path) -> None:
    line = Timeline(path)
    line.step(0, {}, float("nan"), {"up": float("inf"), "down": -np.inf, "one": np.float32(0.5), "all": [1, 2]})
    line.close()
    assert "NaN" not in path.read_text()
    (entry,) = timeline.read(path)
    assert entry["loss"] == "nan"
    assert entry["log"] == {"up": "inf", "down": "-inf", "one": 0.5, "all": "[1, 2]"}


def test_lines_are_written_within_two_seconds(path: Path) -> None:
    hands = Hands()
    line = Timeline(path, now=hands)
    line.step(0, {})
    hands.at += 1.9
    line.step(1, {})
    assert path.read_text() == ""
    hands.at += 0.2
    line.step(2, {})
    assert len(list(timeline.read(path))) == 3
    line.step(3, {})
    hands.at -= 3600  # the wall clock is set back
    line.step(4, {})
    assert len(list(timeline.read(path))) == 5
    line.step(5, {})
    line.flush()
    assert len(list(timeline.read(path))) == 6
    line.close()


def test_a_resumed_run_appends_to_the_file(path: Path) -> None:
    first = Timeline(path)
    first.step(0, {})
    first.step(1, {})
    first.close()
    second = Timeline(path)
    second.resumed(1)
    second.step(1, {})
    second.close()
    seen = [entry.get("step", entry.get("resumed_at")) for entry in timeline.read(path)]
    assert seen == [0, 1, 1, 1]
    assert list(timeline.read(path))[2].keys() == {"t", "resumed_at"}


def test_a_line_that_was_cut_off_is_skipped(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b'{"step": 0, "t": 1.0, "seconds": {}}\n{"step": 1, "t": 1')
    line = Timeline(path, now=Hands())
    line.resumed(1)
    line.close()
    whole = {"step": 0, "t": 1.0, "seconds": {}}
    assert list(timeline.read(path)) == [whole, {"t": 1_760_000_000.0, "resumed_at": 1}]


def test_invalid_lines_are_skipped(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b'\xff\xfe\n[1, 2]\n{"step": 3}\n\n')
    assert list(timeline.read(path)) == [{"step": 3}]


def test_the_end_of_a_long_file_is_read_by_lines(path: Path) -> None:
    line = Timeline(path)
    for step in range(1000):
        line.step(step, {"data": 0.001})
    line.close()
    length = path.stat().st_size // 1000
    for last_bytes in [0, 1, *range(3 * length, 5 * length)]:
        steps = [entry["step"] for entry in timeline.read(path, last_bytes=last_bytes)]
        assert steps == list(range(1000 - len(steps), 1000))
        assert len(steps) * length >= last_bytes - 2 * length
    assert len(list(timeline.read(path, last_bytes=10**9))) == 1000


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_is_reported_once(path: Path) -> None:
    path.parent.mkdir()
    path.symlink_to("/dev/full")
    notes: list[str] = []
    hands = Hands()
    line = Timeline(path, notes.append, now=hands)
    for step in range(10):
        hands.at += 10
        line.step(step, {"data": 0.1}, 1.0)
    line.resumed(3)
    line.flush()
    line.close()
    assert len(notes) == 1
    assert "No space left on device" in notes[0]
    assert str(path) in notes[0]


def test_a_disk_that_fills_up_keeps_what_was_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hands = Hands()
    notes: list[str] = []
    line = Timeline(path, notes.append, now=hands)
    room = [60]
    really = os.write

    def write(file: int, data: bytes) -> int:
        taken = min(room[0], len(data))
        if not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        room[0] -= taken
        return really(file, data[:taken])

    monkeypatch.setattr(timeline.os, "write", write)
    for step in range(10):
        hands.at += 10
        line.step(step, {"data": 0.1})
    line.close()
    assert len(notes) == 1
    assert path.stat().st_size == 60
    assert [entry["step"] for entry in timeline.read(path)] == [0]


def test_a_folder_that_cannot_be_created_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "timeline").write_text("a file where the directory should be")
    notes: list[str] = []
    line = Timeline(tmp_path / "timeline" / "rank-0.jsonl", notes.append)
    line.step(0, {})
    line.close()
    assert len(notes) == 1


def test_notes_are_optional(tmp_path: Path) -> None:
    (tmp_path / "timeline").write_text("")
    Timeline(tmp_path / "timeline" / "rank-0.jsonl").close()


def test_no_file_stays_open(path: Path) -> None:
    files = Path("/proc/self/fd")
    if not files.exists():
        pytest.skip("needs /proc")
    before = len(list(files.iterdir()))
    line = Timeline(path)
    assert len(list(files.iterdir())) == before + 1
    line.close()
    assert len(list(files.iterdir())) == before


def test_numbers_that_no_float_holds_and_names_that_are_no_text(path: Path) -> None:
    line = Timeline(path)
    line.step(0, {}, 1.0, {7: 3.0, "big": Fraction(10**400), "small": -inf, None: 1})  # type: ignore[dict-item]
    line.close()
    (entry,) = timeline.read(path)
    assert entry["log"] == {"7": 3.0, "big": str(10**400), "small": "-inf", "None": 1}
    assert [as_number(10**400), as_number(-(10**400)), as_number("inf"), as_number("a")] == [inf, -inf, inf, None]
    assert (plain(2**1024), plain(-(10**5000)), plain(2**1023)) == (inf, -inf, 2**1023)
