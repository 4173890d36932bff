"""Trackers record every step once, whatever their files ended with."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import ROOT
from unisono.trackers.csv_file import CsvFile
from unisono.trackers.follower import describe_run, steps_in
from unisono.trackers.registry import TRACKERS, TrackerEntry, build_tracker, names_of, tracker_problems
from unisono.trackers.tensorboard import TensorBoard, masked_crc
from unisono.trackers.tracker import TrackedRun, Tracker

NO_RESULT: Mapping[str, Any] = {}


def described(folder: Path) -> TrackedRun:
    return TrackedRun(folder, folder.name, "id", {"batch": 8}, {"torch": "2.13.0"})


def record_steps(tracker: Tracker, folder: Path, first: int, last: int, result: Mapping[str, Any] = NO_RESULT) -> None:
    """Record steps as a follower does. Without a result the run was killed."""
    done = tracker.start(described(folder))
    for step in range(first, last):
        if step > done:
            tracker.log(step, 1000.0 + step, {"loss": 1.0 / (step + 1), "lr": 0.1})
    tracker.flush()
    tracker.finish(result)


def csv_rows(folder: Path) -> list[tuple[int, str]]:
    lines = (folder / "metrics.csv").read_text().splitlines()
    assert lines[0] == "step,time,name,value"
    return [(int(line.split(",")[0]), line.split(",")[2]) for line in lines[1:]]


@pytest.mark.parametrize("cut", range(0, 80, 7))
def test_csv_has_every_step_once_after_a_cut(tmp_path: Path, cut: int) -> None:
    record_steps(CsvFile(), tmp_path, 0, 8)
    path = tmp_path / "metrics.csv"
    path.write_bytes(path.read_bytes()[: -cut or None])
    record_steps(CsvFile(), tmp_path, 3, 12)
    assert csv_rows(tmp_path) == [(step, name) for step in range(12) for name in ("loss", "lr")]


def test_csv_of_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,ti")
    record_steps(CsvFile(), tmp_path, 0, 2)
    assert [step for step, _ in csv_rows(tmp_path)] == [0, 0, 1, 1]


@pytest.mark.parametrize(("data", "crc"), [(b"", 0xA282EAD8), (b"123456789", 0xE3069283)])
def test_checksums(data: bytes, crc: int) -> None:
    """The second value is the check value of CRC-32C in Koopman's and the RevEng catalogue, before the mask."""
    masked = crc if not data else ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    assert masked_crc(data) == masked


@pytest.mark.parametrize("cut", [0, 1, 5, 30, 61])
def test_tensorboard_reads_every_step_once(tmp_path: Path, cut: int) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install tensorboard")
    record_steps(TensorBoard(), tmp_path, 0, 200)
    (file,) = (tmp_path / "tensorboard").iterdir()
    file.write_bytes(file.read_bytes()[: -cut or None])
    record_steps(TensorBoard(), tmp_path, 150, 210, {"loss": 0.5})
    read = f"""
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
found = EventAccumulator({str(tmp_path / "tensorboard")!r}, size_guidance={{"scalars": 0}})
found.Reload()
print([event.step for event in found.Scalars("loss")] == list(range(210)))
print(all(abs(event.value - 1 / (event.step + 1)) < 1e-6 for event in found.Scalars("loss")))
print([event.wall_time for event in found.Scalars("lr")][:2], sorted(found.Tags()["tensors"]))
print(found.Tensors("settings")[0].tensor_proto.string_val[0].decode())
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", read], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines()[:3] == [
        "True",
        "True",
        "[1000.0, 1001.0] ['environment', 'result', 'settings']",
    ], done.stderr
    assert '"batch": 8' in done.stdout


def test_lines_of_a_timeline() -> None:
    lines = [
        b'{"step": 3, "t": 7.5, "us": [], "loss": "nan", "log": {"lr": 0.1, "text": "x", "flag": true}}',
        b'{"resumed_at": 3}',
        b'{"step": 4, "t": 8.5, "sec',
        b"",
        b'{"step": 5, "t": 9.5, "us": []}',
    ]
    (first, last) = steps_in(lines)
    assert str(first) == "(3, 7.5, {'loss': nan, 'lr': 0.1, 'flag': 1.0})"
    assert last == (5, 9.5, {})


def test_a_run_keeps_its_id(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text("batch = 8\n[parallel]\nshard = 2\n")
    first = describe_run(tmp_path)
    assert first.settings == {"batch": 8, "parallel.shard": 2}
    assert describe_run(tmp_path).id == first.id


def test_trackers_that_cannot_be_used_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def problems(track: str) -> list[str]:
        return [str(problem.error) for problem in tracker_problems(track, lambda text: f"--set {text}")]

    assert names_of(" csv, tensorboard,csv,") == ["csv", "tensorboard"]
    assert problems("csv,tensorboard,tests.unit.test_trackers:TensorBoard") == []
    assert problems("tensorbord,wandbb") == ["track = tensorbord names no tracker.", "track = wandbb names no tracker."]
    monkeypatch.setitem(TRACKERS, "pigeon", TrackerEntry("unisono.trackers.csv_file:CsvFile", "pigeon_post", "pigeons"))
    assert problems("pigeon") == ["track = pigeon needs the package pigeon_post."]
    (near,) = tracker_problems("tensorbord", lambda text: f"--set {text}")
    assert near.remedy == "--set track=tensorboard"
    assert isinstance(build_tracker("unisono.trackers.csv_file:CsvFile"), CsvFile)


def test_trackers_need_neither_torch_nor_their_packages() -> None:
    """A follower starts quickly, and holds little memory."""
    code = "import sys, unisono.trackers.follower; print([name in sys.modules for name in ('torch', 'numpy')])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout == "[False, False]\n", done.stderr
