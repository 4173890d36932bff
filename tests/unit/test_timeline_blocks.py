"""The blocks of a timeline: sums over 128 lines, with the place of these lines."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from unisono.monitor import timeline
from unisono.monitor.timeline import Timeline
from unisono.monitor.timeline_blocks import LINES, read_blocks


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "timeline" / "rank-0.jsonl"


def write(path: Path, steps: range, *, close: bool = True) -> Timeline:
    line = Timeline(path)
    for step in steps:
        if step % 100 == 7:
            line.event({"event": "skipped", "step": step})
        spent = {"data": 1e-6 * step, "evaluate": 0.5 if step == 200 else 0.0}
        loss = math.nan if step == 150 else 1.0 / (step + 1)
        more = {"samples": 8, "lr": 0.5 - step / 1000}
        line.step(step, spent, loss, {"größe": step, "word": "x"}, steps=1, wait=2e-6, more=more)
    if close:
        line.close()
    return line


def test_blocks_sum_up_the_lines_at_the_place_that_they_name(path: Path) -> None:
    write(path, range(300))
    blocks = list(read_blocks(path.with_suffix(".blocks")))
    assert [block["steps"] for block in blocks] == [[0, LINES - 1], [LINES, 2 * LINES - 1]]
    data = path.read_bytes()
    for block in blocks:
        start, end = block["bytes"]
        entries = [timeline.decode(line) for line in data[start:end].splitlines()]
        steps = [entry for entry in entries if entry is not None and "seconds" in entry]
        assert [entry["step"] for entry in steps] == list(range(block["steps"][0], block["steps"][1] + 1))
        assert block["n"] == LINES
        assert block["t"] == [steps[0]["t"], steps[-1]["t"]]
        assert block["us"][1] == round(1e6 * sum(entry["seconds"].get("data", 0) for entry in steps))
        assert block["wait"] == 2 * LINES
        assert block["samples"] == 8 * LINES
        losses = [entry["loss"] for entry in steps if entry["loss"] != "nan"]
        assert block["loss"] == [min(losses), max(losses), losses[-1]]
        assert block["log"] == {"größe": [steps[0]["step"], steps[-1]["step"], steps[-1]["step"]]}
        assert block.get("events", []) == [entry for entry in entries if entry is not None and "event" in entry]
    assert blocks[1]["us"][7] == 500_000
    assert blocks[1]["longest"] == 500_200


def test_a_killed_process_leaves_a_gap_between_two_blocks(path: Path) -> None:
    write(path, range(200), close=False).flush()  # as if killed: the second block is lost
    with path.open("ab") as file:
        file.write(b'{"step":200,"t":17')
    write(path, range(200, 400))
    blocks = list(read_blocks(path.with_suffix(".blocks")))
    assert [block["steps"] for block in blocks] == [[0, 127], [200, 327]]
    data = path.read_bytes()
    first = data[blocks[1]["bytes"][0] :].splitlines()[0]
    assert json.loads(first)["step"] == 200
    assert data[: blocks[1]["bytes"][0]].endswith(b"\n")


def test_a_damaged_block_is_skipped(path: Path) -> None:
    write(path, range(300))
    blocks = path.with_suffix(".blocks")
    blocks.write_bytes(b"\xff\n" + blocks.read_bytes()[:-5])
    assert len(list(read_blocks(blocks))) == 1
    assert list(read_blocks(path.with_suffix(".absent"))) == []


def test_blocks_that_cannot_be_written_do_not_end_the_timeline(path: Path) -> None:
    path.parent.mkdir()
    path.with_suffix(".blocks").mkdir()
    write(path, range(300))
    assert sum("seconds" in entry for entry in timeline.read(path)) == 300
