"""The timeline of a rank as columns: lines and blocks, resumes, growing files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from unisono.monitor.timeline import Timeline
from unisono.report import rank_series
from unisono.report.rank_series import RankSeries, main_columns, present
from unisono.report.step_buckets import divide, rank_buckets, value_buckets


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "timeline" / "rank-0.jsonl"


def write(path: Path, *parts: range) -> None:
    """Write these steps, each part by a process of its own that resumes the run."""
    for part in parts:
        line = Timeline(path, now=lambda: 0.0)
        if part.start:
            line.resumed(part.start)
        for step in part:
            spent = {"forward": 0.25 + 1e-6 * step, "exchange": 0.5}
            line.step(step, spent, loss(step), wait=0.125, more={"samples": 4, "lr": 0.5})
        line.close()


def loss(step: int) -> float:
    return 1000.0 if step == 777 else 1.0 + 1.0 / (1 + step)


@pytest.mark.parametrize("whole_bytes", [1 << 30, 0])
def test_every_step_is_there_once(path: Path, monkeypatch: pytest.MonkeyPatch, whole_bytes: int) -> None:
    monkeypatch.setattr(rank_series, "WHOLE_BYTES", whole_bytes)
    write(path, range(1000), range(900, 1300), range(1300, 1310))
    series = RankSeries(path, 0)
    assert series.read()
    assert not series.read()
    columns = series.columns()
    assert int(columns.steps.sum()) == 1310
    assert columns.last[-1] == 1309
    assert (np.diff(columns.last) > 0).all()
    assert columns.seconds[:, 2].sum() == pytest.approx(0.25 * 1310 + 1e-6 * sum(range(1310)), rel=1e-9)
    assert columns.wait.sum() == pytest.approx(0.125 * 1310)
    assert columns.samples.sum() == 4 * 1310
    assert columns.values["loss"][:, 1].max() == 1000.0
    assert len(columns.last) == (1310 if whole_bytes else 7 + 4 + 3 + 16 + 10)  # blocks, and lines between them
    assert [event["resumed_at"] for event in series.events] == [900, 1300]


def test_a_growing_timeline_is_read_on(path: Path) -> None:
    line = Timeline(path)
    series = RankSeries(path, 0)
    for step in range(10):
        line.step(step, {"forward": 0.1}, 1.0)
        line.flush()
        with path.open("ab") as file:
            file.write(b'{"step":')  # a line of which only the beginning is written
        assert series.read()
        assert len(series.rows) == step + 1
        path.write_bytes(path.read_bytes()[:-8])
    line.close()


def test_a_file_that_is_damaged_or_absent(path: Path) -> None:
    series = RankSeries(path, 0)
    assert not series.read()
    path.parent.mkdir()
    path.write_bytes(
        b'\xff\n{"step":1,"t":2.0,"us":"x"}\n{"step":"a","t":1,"us":[]}\n{"step":3,"t":1.0,"us":[5]}\n[]\n'
    )
    assert series.read()
    assert [row.last for row in series.rows] == [3]


def test_buckets_keep_extremes_and_means(path: Path) -> None:
    write(path, range(1310))
    series = RankSeries(path, 0)
    series.read()
    columns = series.columns()
    buckets = divide(columns, 50)
    assert buckets.size == 50
    assert buckets.last[-1] == 1309
    low, high, last = value_buckets(columns, "loss", buckets)
    assert np.nanmax(high) == 1000.0
    assert np.nanmin(low) == loss(1309)
    assert last[-1] == loss(1309)
    times = rank_buckets(columns, buckets)
    assert times.steps.sum() == 1310
    assert times.total == pytest.approx(0.75, abs=0.01)
    assert times.own == pytest.approx(0.625, abs=0.01)
    few = divide(columns, 5000)
    assert few.last == list(range(1310))


def test_another_main_process_and_a_resume(tmp_path: Path) -> None:
    """Rank 0 dies after step 39, rank 1 leads to step 119, and the run is resumed at step 80 on rank 0 alone."""
    clock = [0.0]
    paths = [tmp_path / f"rank-{rank}.jsonl" for rank in range(2)]
    lines = [Timeline(path, now=lambda: clock[0]) for path in paths]
    start = {"event": "start", "step": 0, "ranks": 2}
    for line in lines:
        line.event(start)
    for step in range(120):
        clock[0] += 1
        for rank, line in enumerate(lines):
            if rank or step < 40:
                leads = rank == 0 or step >= 40
                line.step(step, {"forward": 0.5}, 1.0, more={"samples": 4} if leads else {})
        if step == 40:
            lines[1].event({"event": "death", "step": 40, "ranks": [0]})
    for line in lines:
        line.close()
    ranks = {rank: RankSeries(path, rank) for rank, path in enumerate(paths)}
    for series in ranks.values():
        series.read()
    assert present(ranks) == [1]
    assert main_columns(ranks).last.tolist() == list(range(120))

    clock[0] += 1
    line = Timeline(paths[0], now=lambda: clock[0])
    line.resumed(80)
    line.event({**start, "step": 80, "ranks": 1})
    for step in range(80, 160):
        clock[0] += 1
        line.step(step, {"forward": 0.5}, 1.0, more={"samples": 4})
    line.close()
    ranks[0].read()
    assert present(ranks) == [0]
    columns = main_columns(ranks)
    assert columns.last.tolist() == list(range(160))
    assert (columns.rank, columns.samples.sum()) == (0, 640)
