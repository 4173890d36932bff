"""Trackers record every step once, whatever their files ended with."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.command import ROOT
from unisono.monitor.timeline import decode
from unisono.trackers.csv_file import CsvFile
from unisono.trackers.event_file import masked_crc
from unisono.trackers.registry import TRACKERS, TrackerEntry, build_tracker, names_of, tracker_problems
from unisono.trackers.tensorboard import TensorBoard
from unisono.trackers.tracker import Media, TrackedRun, Tracker
from unisono.train.recording.media_recorder import table_json
from unisono.train.recording.png import encode_png
from unisono.train.tracking.follower import Feed, SafeTracker, TrackingFile, Unsent, describe_run, numbers_in

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


@pytest.mark.parametrize("cut", [*range(20), *range(22, 50, 3)])  # 21 bytes are the last row
def test_csv_reads_names_with_ends_of_lines(tmp_path: Path, cut: int) -> None:
    """The last name of a step looks like a row of another step."""
    names = ["z", 'quote " in it', "a\rb", "a\r\nb", "\ud800", 'a\n5,"b\n', "a\n7"]

    def record(first: int, last: int) -> None:
        tracker = CsvFile()
        done = tracker.start(described(tmp_path))
        for step in range(max(first, done + 1), last):
            tracker.log(step, 1000.0, dict.fromkeys(names, 0.5))
        tracker.finish({})

    record(0, 8)
    path = tmp_path / "metrics.csv"
    path.write_bytes(path.read_bytes()[: -cut or None])
    record(3, 12)
    with path.open(newline="") as file:
        rows = [(row["step"], row["name"]) for row in csv.DictReader(file)]
    escaped = [name.replace("\ud800", "\\ud800") for name in names]
    assert rows == [(str(step), name) for step in range(12) for name in escaped]


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
    read = """
print([event.step for event in found.Scalars("loss")] == list(range(210)))
print(all(abs(event.value - 1 / (event.step + 1)) < 1e-6 for event in found.Scalars("loss")))
print([event.wall_time for event in found.Scalars("lr")][:2], sorted(found.Tags()["tensors"]))
print(found.Tensors("settings")[0].tensor_proto.string_val[0].decode())
"""
    lines = read_tensorboard(tmp_path, read)
    assert lines[:3] == ["True", "True", "[1000.0, 1001.0] ['environment', 'result', 'settings']"]
    assert '"batch": 8' in "\n".join(lines)


def read_tensorboard(folder: Path, code: str) -> list[str]:
    """Return what this code prints. `found` is TensorBoard's reader of a run directory."""
    load = f"""
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
found = EventAccumulator({str(folder / "tensorboard")!r}, size_guidance=dict.fromkeys(
    ("scalars", "images", "histograms", "tensors"), 0))
found.Reload()
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", load + code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def media_of(folder: Path) -> list[Media]:
    """Write and return an image, a text, a table and a histogram."""
    files = [folder / name for name in ("1.png", "1.txt", "1.json")]
    files[0].write_bytes(encode_png(np.arange(18, dtype=np.uint8).reshape(2, 3, 3)))
    files[1].write_text("*words*")
    files[2].write_text(table_json(["a", "b"], [[1, "x|y"]]))
    found = [Media(kind, kind, file) for kind, file in zip(("image", "text", "table"), files, strict=True)]
    return [*found, Media("histogram", "histogram", counts=[3, 0, 5], edges=[-1.0, 0.0, 1.0, 2.0])]


def test_tensorboard_reads_media(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install tensorboard")
    tracker = TensorBoard()
    tracker.start(described(tmp_path))
    for media in media_of(tmp_path):
        tracker.log_media(3, 1003.0, media)
    tracker.log(3, 1003.0, {"loss": 0.5})
    tracker.finish({})
    again = TensorBoard()
    assert again.start(described(tmp_path)) == 3
    again.finish({})
    lines = read_tensorboard(
        tmp_path,
        """
(image,) = found.Images("image")
print(image.step, image.wall_time, image.width, image.height, len(image.encoded_image_string))
(histogram,) = found.Histograms("histogram")
value = histogram.histogram_value
print(histogram.step, value.min, value.max, value.num, value.bucket_limit, value.bucket)
for name in ("text", "table"):
    (event,) = found.Tensors(name)
    print(event.step, repr(event.tensor_proto.string_val[0].decode()))
print([event.step for event in found.Scalars("loss")])
""",
    )
    size = len((tmp_path / "1.png").read_bytes())
    assert lines == [
        f"3 1003.0 3 2 {size}",
        "3 -1.0 2.0 8.0 [0.0, 1.0, 2.0] [3.0, 0.0, 5.0]",
        "3 '*words*'",
        "3 '| a | b |\\n| --- | --- |\\n| 1 | x\\\\|y |'",
        "[3]",
    ]


def test_tensorboard_shows_large_numbers_as_infinite(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install tensorboard")
    tracker = TensorBoard()
    tracker.start(described(tmp_path))
    tracker.log_media(0, 1.0, Media("histogram", "h", counts=[1, 2], edges=[-1.5e308, 0.0, 1.5e308]))
    tracker.log(0, 1.0, {"x": 1e39, "y": -1e300, "z": 3.4e38, "\ud800": 1.0})
    tracker.log(1, 2.0, {"x": 2.0})
    tracker.finish({})
    lines = read_tensorboard(
        tmp_path,
        """
print([event.value for event in found.Scalars("x")], found.Scalars("y")[0].value)
print(found.Scalars("z")[0].value < 1e39, found.Scalars(chr(92) + "ud800")[0].value)
(value,) = (event.histogram_value for event in found.Histograms("h"))
print(value.num, value.sum, value.sum_squares)
""",
    )
    assert lines == ["[inf, 2.0] -inf", "True 1.0", "3.0 7.5e+307 inf"]


class Recorder:
    """A tracker that keeps what it gets. `done`: the last step that it has at the start."""

    def __init__(self, done: int = -1) -> None:
        self.done, self.got = done, list[Any]()

    def start(self, run: TrackedRun) -> int:
        return self.done

    def log(self, step: int, time: float, numbers: Mapping[str, float]) -> None:
        self.got.append((step, *numbers))

    def log_media(self, step: int, time: float, media: Media) -> None:
        self.got.append((step, media.name))

    def flush(self) -> None:
        pass

    def finish(self, result: Mapping[str, Any]) -> None:
        self.got.append("end")


def fed(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    lines: list[str],
    *,
    done: int = -1,
    ended: bool = True,
    finished: dict[str, int] | None = None,
) -> list[Any]:
    """Return what a tracker gets of a timeline."""
    recorder = Recorder(done)
    monkeypatch.setattr("unisono.train.tracking.follower.build_tracker", lambda name: recorder)
    safe = SafeTracker("mine", described(folder))
    feed = Feed([safe], Unsent(folder), {} if finished is None else finished)
    for line in lines:
        feed.line(line.encode())
    feed.finish({"loss": 1.0} if ended else {})
    return recorder.got


def media_line(step: int, name: str = "h") -> str:
    return f'{{"t":1.0,"media":"histogram","name":"{name}","step":{step},"counts":[1],"edges":[0,1]}}'


def step_line(step: int) -> str:
    return f'{{"step":{step},"t":1.5,"us":[]}}'


def test_numbers_of_a_timeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        '{"step":3,"t":7.5,"us":[],"loss":"nan","lr":0.1,"grad_norm":2.0,"log":{"text":"x","flag":true,"lr":3}}',
        '{"resumed_at": 3}',
        '{"step": 4, "t": 8.5, "sec',
        "",
        step_line(5),
    ]
    assert fed(tmp_path, monkeypatch, lines) == [(3, "loss", "lr", "grad_norm", "flag"), (5,), "end"]
    entry = decode(lines[0].encode())
    assert entry is not None
    assert str(numbers_in(entry)) == "{'loss': nan, 'lr': 3.0, 'grad_norm': 2.0, 'flag': 1.0}"


def test_a_number_without_a_float_is_infinite() -> None:
    assert numbers_in({"log": {"x": 10**400, "y": -(10**400), "z": 1}}) == {"x": inf, "y": -inf, "z": 1.0}


def test_media_come_before_the_line_of_their_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [media_line(0), media_line(0), step_line(0), media_line(2), step_line(4), media_line(5)]
    assert fed(tmp_path, monkeypatch, lines) == [(0, "h"), (0,), (2, "h"), (4,), (4, "h"), "end"]


def test_media_of_a_step_that_was_not_finished_are_sent_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = [step_line(0), media_line(1), step_line(1), media_line(2)]
    assert fed(tmp_path, monkeypatch, killed, ended=False) == [(0,), (1, "h"), (1,), "end"]
    resumed = [*killed, '{"t":2.0,"resumed_at":1}', media_line(1), step_line(1), media_line(2, "g"), step_line(2)]
    assert fed(tmp_path, monkeypatch, resumed, done=1) == [(2, "g"), (2,), "end"]


def test_media_after_the_last_step_are_sent_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished: dict[str, int] = {}
    lines = [step_line(0), media_line(1)]
    assert fed(tmp_path, monkeypatch, lines, finished=finished) == [(0,), (0, "h"), "end"]
    assert finished == {"mine": 0}
    assert fed(tmp_path, monkeypatch, lines, done=0, finished=finished) == ["end"]
    assert fed(tmp_path, monkeypatch, lines, done=0) == [(0, "h"), "end"]  # killed before it had finished


def test_media_whose_file_is_gone_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ['{"t":1,"media":"image","name":"i","step":0,"file":"media/i/0.png"}', step_line(0)]
    assert fed(tmp_path, monkeypatch, lines) == [(0,), "end"]


def test_a_run_keeps_its_id(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text("batch = 8\n[parallel]\nshard = 2\n")
    first = TrackingFile(tmp_path / "tracking.json")
    assert describe_run(tmp_path, first.id).settings == {"batch": 8, "parallel.shard": 2}
    first.finished["csv"] = 7
    first.write()
    again = TrackingFile(tmp_path / "tracking.json")
    assert (again.id, again.finished) == (first.id, {"csv": 7})


def test_trackers_that_cannot_be_used_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def problems(track: str) -> list[str]:
        return [str(problem.error) for problem in tracker_problems(track, lambda text: f"--set {text}")]

    assert names_of(" csv, tensorboard,csv,") == ["csv", "tensorboard"]
    assert problems("csv,tensorboard,tests.unit.test_trackers:TensorBoard") == []
    assert problems("tensorbord,wandbb") == ["track = tensorbord names no tracker.", "track = wandbb names no tracker."]
    monkeypatch.setitem(TRACKERS, "pigeon", TrackerEntry("unisono.trackers.csv_file:CsvFile", "pigeon_post"))
    assert problems("pigeon") == ["track = pigeon needs the package pigeon_post."]
    (missing,) = tracker_problems("pigeon", str)
    assert missing.remedy == "pip install 'unisono[pigeon]'"
    (near,) = tracker_problems("tensorbord", lambda text: f"--set {text}")
    assert near.remedy == "--set track=tensorboard"
    assert isinstance(build_tracker("unisono.trackers.csv_file:CsvFile"), CsvFile)


def test_a_folder_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B makes a folder of its own name where it runs, which Python can import as a package without content."""
    (tmp_path / "pigeon_post").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(TRACKERS, "pigeon", TrackerEntry("x:Y", "pigeon_post"))
    assert len(tracker_problems("pigeon", str)) == 1


def test_trackers_need_neither_torch_nor_their_packages() -> None:
    """A follower starts quickly, and holds little memory."""
    code = "import sys, unisono.train.tracking.follower; print([name in sys.modules for name in ('torch', 'numpy')])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout == "[False, False]\n", done.stderr
