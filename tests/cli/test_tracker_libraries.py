"""Trackers with their real libraries: a follower reads a timeline, is killed, and continues."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest

from tests.cli.command import ROOT
from tests.cli.mlflow_server import mlflow_server, needs_server
from tests.cli.wandb_server import wandb_server
from unisono.environment import inherited
from unisono.trackers.registry import variables_of
from unisono.train.recording.png import encode_png

STEPS, EVERY = 300, 30
"""Steps of a timeline, and steps between two that have media."""

KILLS = 10

MEDIA = dict.fromkeys(range(0, STEPS, EVERY), ("picture", "words", "weights"))


def needs(package: str) -> pytest.MarkDecorator:
    reason = f"{package} is not installed: pip install 'unisono[{package}]'"
    return pytest.mark.skipif(find_spec(package) is None, reason=reason)


@dataclass
class Folder:
    """A run directory with a timeline, in which no training runs. Its processes have an empty home folder.

    Attributes:
        run_dir: The run directory.
        home: The home folder.
    """

    run_dir: Path
    home: Path

    @property
    def timeline(self) -> Path:
        return self.run_dir / "timeline" / "rank-0.jsonl"

    def follow(self, track: str, **variables: str) -> subprocess.Popen[str]:
        """Start a follower."""
        module = "unisono.train.tracking.follower"
        words = [sys.executable, "-m", module, str(self.run_dir), str(self.timeline), track, "0"]
        defaults = {**variables_of(track, self.run_dir), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        return subprocess.Popen(
            words,
            env=inherited({**defaults, "HOME": str(self.home), **variables}),
            cwd=self.home.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self, track: str, **variables: str) -> str:
        """Run a follower to its end, as after a run that ended. Return what it prints."""
        (self.run_dir / "result.json").unlink(missing_ok=True)
        follower = self.follow(track, **variables)
        (self.run_dir / "result.json").write_text('{"loss": 0.5, "steps": 300}')
        out, _ = follower.communicate(timeout=200)
        return out

    def python(self, code: str, **variables: str) -> Any:
        """Return what this code prints as JSON, with the environment of a user."""
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=inherited({"HOME": str(self.home), "HF_HUB_OFFLINE": "1", **variables}),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    run_dir, home = tmp_path / "out", tmp_path / "home"
    for path in (run_dir / "timeline", run_dir / "media", home):
        path.mkdir(parents=True)
    (run_dir / "settings.toml").write_text("batch = 8\n[parallel]\nshard = 2\n")
    (run_dir / "environment.json").write_text('{"torch": "2.13.0"}')
    lines = []
    for step in range(STEPS):
        if step % EVERY == 0:
            (run_dir / f"media/{step}.png").write_bytes(encode_png(np.full((2, 3, 3), step % 256, np.uint8)))
            (run_dir / f"media/{step}.txt").write_text(f"<step {step}>")
            about = {"t": 1000.0 + step, "step": step}
            lines += [
                {**about, "media": "image", "name": "picture", "file": f"media/{step}.png"},
                {**about, "media": "text", "name": "words", "file": f"media/{step}.txt"},
                {**about, "media": "histogram", "name": "weights", "counts": [1, 2], "edges": [0.0, 1.0, 2.0]},
            ]
        lines.append({"step": step, "t": 1000.5 + step, "us": [], "loss": 1 / (step + 1), "lr": 0.1})
    found = Folder(run_dir, home)
    found.timeline.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return found


def kill_tree(process: subprocess.Popen[str]) -> None:
    """Send SIGKILL to a follower and to the processes of its libraries."""
    tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for each in tree:
        each.suspend()
    for each in tree:
        each.kill()
    process.communicate()


def kill_often(folder: Folder, track: str, longest: float, **variables: str) -> None:
    """Start a follower and kill it at a random time up to `longest` seconds after its start, ten times.

    The timeline grows from start to start, as that of a run which is resumed.
    """
    rng = random.Random(track)
    lines = folder.timeline.read_text().splitlines(keepends=True)
    for number in range(KILLS):
        folder.timeline.write_text("".join(lines[: len(lines) * (number + 1) // (KILLS + 1)]))
        follower = folder.follow(track, **variables)
        time.sleep(rng.uniform(0.2, longest))
        if rng.random() < 0.7:
            kill_tree(follower)
        else:
            follower.send_signal(signal.SIGKILL)  # the processes of its library are left
            follower.communicate()
    folder.timeline.write_text("".join(lines))


# -- W&B


def synced(folder: Folder) -> list[dict[str, Any]]:
    """Return the history of the run on a server, after `wandb sync`."""
    with wandb_server() as server:
        variables = {"WANDB_BASE_URL": server.address, "WANDB_API_KEY": "a" * 40, "WANDB_ERROR_REPORTING": "false"}
        own = {f"WANDB_{name}_DIR": str(folder.home.parent / "sync") for name in ("CACHE", "CONFIG", "DATA")}
        files = sorted(folder.run_dir.glob("wandb/offline-run-*"))
        done = subprocess.run(
            [sys.executable, "-m", "wandb", "sync", "--yes", *map(str, files)],
            env=inherited({**variables, **own, "HOME": str(folder.home)}),
            cwd=folder.home.parent,  # where it writes a log
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "ERROR" not in done.stderr, done.stderr
        (run,) = server.runs.values()
    assert sorted(run) == list(range(len(run)))
    return [run[number] for number in sorted(run)]


def check_wandb(folder: Folder) -> None:
    history = synced(folder)
    assert [line["_step"] for line in history] == list(range(STEPS))
    assert [line["loss"] for line in history] == pytest.approx([1 / (step + 1) for step in range(STEPS)])
    kinds = ("image-file", "html-file", "histogram")
    for line in history:
        found = {name: line[name]["_type"] for name in ("picture", "words", "weights") if name in line}
        names = MEDIA.get(line["_step"], ())
        assert found == dict(zip(names, kinds, strict=False))


@pytest.mark.slow
@needs("wandb")
def test_wandb_records_a_run(folder: Folder) -> None:
    assert folder.finish("wandb") == ""
    check_wandb(folder)
    ids = {path.name.rpartition("-")[2] for path in folder.run_dir.glob("wandb/offline-run-*")}
    assert ids == {json.loads((folder.run_dir / "tracking.json").read_text())["id"]}
    assert list(folder.home.rglob("*")) == []


@needs("wandb")
@pytest.mark.slow
def test_wandb_has_every_step_once_after_kills(folder: Folder) -> None:
    kill_often(folder, "wandb", 3.0)
    assert folder.finish("wandb") == ""
    check_wandb(folder)


# -- Trackio

READ_TRACKIO = """
import json
from trackio.sqlite_storage import SQLiteStorage
(run,) = SQLiteStorage.get_runs("unisono")
print(json.dumps([run, SQLiteStorage.get_run_config("unisono", run)["batch"], [
    [row["step"], row["loss"], {name: value["_type"] for name, value in row.items() if isinstance(value, dict)}]
    for row in SQLiteStorage.get_logs("unisono", run)]]))
"""


def check_trackio(folder: Folder) -> None:
    run, batch, rows = folder.python(READ_TRACKIO, TRACKIO_DIR=str(folder.run_dir / "trackio"))
    run_id = json.loads((folder.run_dir / "tracking.json").read_text())["id"]
    assert (run, batch) == (f"out-{run_id[:8]}", 8)
    kinds = ("trackio.image", "trackio.markdown", "trackio.histogram")
    expected = [[s, 1 / (s + 1), dict(zip(MEDIA.get(s, ()), kinds, strict=False))] for s in range(STEPS)]
    assert rows == expected


@pytest.mark.ci
@needs("trackio")
def test_trackio_records_a_run(folder: Folder) -> None:
    assert folder.finish("trackio") == ""
    check_trackio(folder)
    assert list(folder.home.rglob("*")) == []


@needs("trackio")
@pytest.mark.slow
def test_trackio_has_every_step_once_after_kills(folder: Folder) -> None:
    kill_often(folder, "trackio", 3.0)
    assert folder.finish("trackio") == ""
    check_trackio(folder)


@needs("trackio")
def test_trackio_with_a_space_is_one_message(folder: Folder) -> None:
    said = folder.finish("trackio", TRACKIO_SPACE_ID="me/space")
    assert said == (
        "The tracker trackio could not start: ValueError: only a folder can be asked for the last step. Unset "
        "TRACKIO_SPACE_ID and TRACKIO_SERVER_URL, and use trackio sync after the run. Training continues without it.\n"
    )


# -- MLflow

READ_MLFLOW = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient()
(run,) = client.search_runs([client.get_experiment_by_name("unisono").experiment_id])
history = client.get_metric_history(run.info.run_id, "loss")
rows = [[metric.step, metric.value, metric.timestamp] for metric in history]
files = [file.path for folder in client.list_artifacts(run.info.run_id, "media")
         for file in client.list_artifacts(run.info.run_id, folder.path)]
print(json.dumps([run.data.tags["unisono.id"], run.info.status, run.data.params, sorted(rows), sorted(files)]))
"""


def check_mlflow(folder: Folder, uri: str) -> None:
    run_id, status, params, rows, files = folder.python(
        READ_MLFLOW, MLFLOW_TRACKING_URI=uri, MLFLOW_DISABLE_TELEMETRY="true"
    )
    assert run_id == json.loads((folder.run_dir / "tracking.json").read_text())["id"]
    assert (status, params) == ("FINISHED", {"batch": "8", "parallel.shard": "2"})
    assert rows == [[step, 1 / (step + 1), 1000500 + 1000 * step] for step in range(STEPS)]
    names = ("picture/{}.png", "weights/{}.histogram.json", "words/{}.txt")
    assert files == sorted(f"media/{name.format(step)}" for step in MEDIA for name in names)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """Run a real server of MLflow. Yield its address."""
    with mlflow_server(tmp_path / "server") as address:
        yield address


@needs_server
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_mlflow_has_every_step_once_after_kills(folder: Folder, server: str) -> None:
    kill_often(folder, "mlflow", 12.0, MLFLOW_TRACKING_URI=server)
    assert folder.finish("mlflow", MLFLOW_TRACKING_URI=server) == ""
    check_mlflow(folder, server)
    assert list(folder.home.rglob("*")) == []
    assert not (folder.run_dir / "mlflow").exists()


@needs_server
@pytest.mark.slow
def test_mlflow_records_to_a_database_of_the_run(folder: Folder) -> None:
    assert folder.finish("mlflow") == ""
    check_mlflow(folder, f"sqlite:///{folder.run_dir}/mlflow/mlflow.db")
    assert list(folder.home.rglob("*")) == []
    assert sorted(path.name for path in folder.home.parent.iterdir()) == ["home", "out"]


@needs("mlflow")
@pytest.mark.slow
def test_mlflow_without_a_server_is_one_message(folder: Folder) -> None:
    said = folder.finish("mlflow,csv", MLFLOW_TRACKING_URI="http://127.0.0.1:9", MLFLOW_HTTP_REQUEST_MAX_RETRIES="0")
    assert said == (
        "The tracker mlflow could not start: ConnectionError: MLflow at http://127.0.0.1:9: [Errno 111] Connection "
        "refused. Does the server of MLFLOW_TRACKING_URI run? Training continues without it.\n"
    )
    assert len((folder.run_dir / "metrics.csv").read_text().splitlines()) == 1 + 2 * STEPS


@needs("mlflow")
@pytest.mark.slow
def test_mlflow_skinny_without_a_server_is_one_message(folder: Folder) -> None:
    (folder.home / "sitecustomize.py").write_text("import sys\nsys.modules['sqlalchemy'] = None\n")
    path = os.pathsep.join([str(folder.home), str(ROOT)])
    said = folder.finish("mlflow", PYTHONPATH=path)
    assert said == (
        f"The tracker mlflow could not start: ImportError: no server is named, and mlflow-skinny cannot write "
        f"sqlite:///{folder.run_dir}/mlflow/mlflow.db. Set MLFLOW_TRACKING_URI=http://HOST:PORT, or: "
        "pip install mlflow. Training continues without it.\n"
    )


# -- those without a library


def check_files(folder: Folder) -> None:
    rows = [row.split(",") for row in (folder.run_dir / "metrics.csv").read_text().splitlines()[1:]]
    assert [(int(row[0]), row[2]) for row in rows] == [(step, name) for step in range(STEPS) for name in ("loss", "lr")]
    if find_spec("tensorboard") is None:
        return
    code = f"""
import json
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
found = EventAccumulator({str(folder.run_dir / "tensorboard")!r}, size_guidance=dict.fromkeys(
    ("scalars", "images", "histograms", "tensors"), 0))
found.Reload()
kinds = (found.Scalars, "loss"), (found.Images, "picture"), (found.Histograms, "weights"), (found.Tensors, "words")
print(json.dumps([[event.step for event in read(name)] for read, name in kinds]))
"""
    assert folder.python(code) == [list(range(STEPS)), *[list(MEDIA)] * 3]


@pytest.mark.slow
def test_files_have_every_step_once_after_kills(folder: Folder) -> None:
    kill_often(folder, "csv,tensorboard", 0.8)
    assert folder.finish("csv,tensorboard") == ""
    check_files(folder)


@pytest.mark.slow
def test_the_tracker_of_the_guide_has_every_step_once_after_kills(folder: Folder) -> None:
    page = (ROOT / "docs/guide/trackers.md").read_text()
    code = re.findall(r"```python\n(.*?)```", page, re.S)
    (example,) = [block for block in code if "class JsonLines" in block]
    (media,) = [block for block in code if "def log_media" in block]
    assert len([line for line in example.splitlines() if line]) < 20
    (folder.home / "mine.py").write_text(example + textwrap.indent(media, "    "))
    path = os.pathsep.join([str(folder.home), str(ROOT)])
    kill_often(folder, "mine:JsonLines", 0.8, PYTHONPATH=path)
    said = folder.finish("mine:JsonLines", PYTHONPATH=path).splitlines()
    lines = [json.loads(line) for line in (folder.run_dir / "numbers.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(step, 1 / (step + 1)) for step in range(STEPS)]
    assert said[-1] == f"{STEPS - EVERY} picture {folder.run_dir}/media/{STEPS - EVERY}.png"


def test_a_folder_that_cannot_be_written_is_one_message(folder: Folder) -> None:
    (folder.run_dir / "tensorboard").write_text("a file is in the way")
    (folder.run_dir / "metrics.csv").mkdir()
    said = folder.finish("csv,tensorboard").splitlines()
    assert [line.partition(": ")[0] for line in said] == [
        f"The tracker {n} could not start" for n in ("csv", "tensorboard")
    ]
    assert all(line.endswith("Training continues without it.") for line in said)


FULL = f"""
set -e
mount -t tmpfs -o size=4m tmpfs "$0"
cp -r "$1"/. "$0"
dd if=/dev/zero of="$0/rest" bs=4k 2> /dev/null || truncate -s -8k "$0/rest"
{sys.executable} -m unisono.train.tracking.follower "$0" "$0/timeline/rank-0.jsonl" "$2" 0 < /dev/null
"""


@pytest.mark.slow
@pytest.mark.parametrize("track", ["csv", "tensorboard", "wandb", "trackio", "mlflow"])
def test_a_full_disk_is_one_message(folder: Folder, track: str, tmp_path: Path) -> None:
    if track in ("wandb", "trackio", "mlflow") and find_spec(track) is None:
        pytest.skip(f"{track} is not installed")
    (place := tmp_path / "full").mkdir()
    variables = {**variables_of(track, place), "PYTHONPATH": str(ROOT), "HOME": str(folder.home), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "bash", "-c", FULL, place, folder.run_dir, track],
        env=inherited(variables),
        capture_output=True,
        text=True,
        timeout=120,
    )
    if "unshare:" in done.stderr or "mount:" in done.stderr:
        pytest.skip("no disk of our own may be mounted here")
    said = done.stdout + done.stderr
    assert said.count(f"The tracker {track} ") == 1, said
    assert "Traceback" not in said
    assert len(said.splitlines()) == 1, said
