"""Runs with trackers: kills, resumes, deaths, and trackers that fail or are slow."""

from __future__ import annotations

import json
import random
import sqlite3
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.cli.command import ROOT, Command
from tests.cli.mlflow_server import mlflow_server, needs_server
from tests.cli.test_deaths import DYING
from tests.cli.test_training import SCRIPT, kill_process_tree, result
from unisono.environment import inherited
from unisono.monitor.timeline import read

OWN = """
import time

class Broken:
    def start(self, run): return -1
    def log(self, step, time, numbers): raise ValueError("no space for you")
    def flush(self): pass
    def finish(self, result): pass

class Slow(Broken):
    def log(self, step, time_, numbers): time.sleep(60)

class Absent(Broken):
    def start(self, run): raise ConnectionError("nothing answers")

class Ends(Broken):
    def start(self, run): self.run, self.steps = run, []; return -1
    def log(self, step, time, numbers): self.steps.append((step, numbers["lr"]))
    def finish(self, result): (self.run.dir / "ends.txt").write_text(
        f"{self.run.name} {self.run.settings['batch']} {self.steps} {result['promise']} {result['weights_sha256']}")
"""

LOGGING = SCRIPT.replace("        step.update(", "        run.log(lr=0.5)\n        step.update(")


MEDIA = LOGGING.replace(
    "        step.update(",
    """        if step.number % 4 == 1:
            run.log_image("sub/picture", torch.rand(3, 4, 5, generator=torch.Generator().manual_seed(step.number)))
            run.log_text("words", f"step {step.number}")
            run.log_histogram("weights", model[0].weight)
            run.log_table("table", ["step", "loss"], [[step.number, step.loss]])
            run.log_image("bad", torch.zeros(5))
        step.update(""",
).replace("    for step in run.steps(", "    run.log_text('first', 'words')\n    for step in run.steps(")
MEDIA = MEDIA.replace("\nunisono.main(main", "    run.log_text('last', 'words')\n\nunisono.main(main")


def steps_of(command: Command, run_dir: str) -> list[int]:
    """Return the steps of the loss in metrics.csv."""
    rows = (command.folder / run_dir / "metrics.csv").read_text().splitlines()[1:]
    return [int(row.split(",")[0]) for row in rows if row.split(",")[2] == "loss"]


def kill_often(command: Command, track: str, pause: float, longest: float) -> None:
    """Start the script MEDIA, and kill all its processes up to `longest` seconds after a step, ten times.

    Then resume it once more, to its end.
    """
    command.script(MEDIA)
    rng = random.Random(track)
    words = ["run", "script.py", "--ranks", "2", "--run-dir", "out", "--set", f"track={track}", "--set"]
    timeline = command.folder / "out" / "timeline" / "rank-0.jsonl"
    for number in range(10):
        launcher = command.start(*words, f"pause={pause}", *(["--resume"] if number else []))
        before = timeline.stat().st_size if timeline.exists() else 0
        while not timeline.exists() or timeline.stat().st_size <= before:
            assert launcher.poll() is None, launcher.communicate()
            time.sleep(0.02)
        time.sleep(rng.uniform(0, longest))
        kill_process_tree(launcher)
        launcher.communicate()
    ended = command.run(*words, f"pause={pause}", "--resume", times=10)
    assert ended.status == 0, ended.err
    wait_for_trackers(command.folder / "out", track.split(","))


def wait_for_trackers(run_dir: Path, names: list[str]) -> None:
    """Wait until the trackers have finished: they may end after the run, because their process has a low priority."""
    until = time.monotonic() + 300
    while not json.loads((run_dir / "tracking.json").read_text())["finished"].keys() >= set(names):
        assert time.monotonic() < until, (run_dir / "tracking.json").read_text()
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@needs_server
def test_mlflow_has_every_step_once_after_kills_and_resumes(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mlflow_server(tmp_path / "server") as address:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        kill_often(command, "mlflow", 0.8, 12.0)
        code = """
import json
from mlflow import MlflowClient
client = MlflowClient()
(run,) = client.search_runs([client.get_experiment_by_name("unisono").experiment_id])
steps = [metric.step for metric in client.get_metric_history(run.info.run_id, "loss")]
print(json.dumps([run.info.status, steps]))
"""
        variables = inherited({"MLFLOW_DISABLE_TELEMETRY": "true"})
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=variables)
    status, steps = json.loads(done.stdout.splitlines()[-1])
    assert status == "FINISHED"
    assert sorted(steps) == list(range(24))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_step_is_there_once_after_kills_and_resumes(command: Command) -> None:
    track = ",".join(("csv", "tensorboard", *(name for name in ("wandb", "trackio") if find_spec(name))))
    kill_often(command, track, 0.1, 1.5)
    assert steps_of(command, "out") == list(range(24))
    found = tensorboard_steps(command.folder / "out")
    often = list(range(1, 24, 4))
    assert found[:5] == [list(range(24)), often, often, often, often]
    assert found[5][0] == 0  # logged before the loop: by each start, for its first step
    assert found[5] == sorted(set(found[5]))
    assert found[6] == [23]
    if "wandb" in track:
        files = sorted((command.folder / "out").glob("wandb/*run-*/*.wandb"))
        history = [step for path in files for step in wandb_steps(path)]
        assert history == list(range(24))
    if "trackio" in track:
        with sqlite3.connect(command.folder / "out" / "trackio" / "unisono.db") as database:
            rows = database.execute("select step, metrics from metrics order by id").fetchall()
        assert [step for step, metrics in rows if "loss" in json.loads(metrics)] == list(range(24))
        assert [step for step, metrics in rows if "words" in json.loads(metrics)] == often
        database.close()


def tensorboard_steps(run_dir: Path) -> list[list[int]]:
    """Return the steps of the loss, and of everything else that the script MEDIA logs."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install tensorboard")
    code = f"""
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
found = EventAccumulator({str(run_dir / "tensorboard")!r}, size_guidance=dict.fromkeys(
    ("scalars", "images", "histograms", "tensors"), 0))
found.Reload()
kinds = [(found.Scalars, "loss"), (found.Images, "sub/picture"), (found.Histograms, "weights")]
kinds += [(found.Tensors, name) for name in ("words", "table", "first", "last")]
print([[event.step for event in read(name)] for read, name in kinds])
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    steps: list[list[int]] = json.loads(done.stdout)
    return steps


def wandb_steps(path: Path) -> list[int]:
    """Return the steps in a file of W&B. (The test of the library reads it with wandb sync.)"""
    code = (
        f"from pathlib import Path; from unisono.trackers.wandb import steps_of; print(steps_of(Path({str(path)!r})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    steps: list[int] = json.loads(done.stdout)
    return steps


@pytest.mark.slow
def test_media_change_no_bits_and_are_written_once(command: Command) -> None:
    command.script(MEDIA)
    ended = command.run("run", "script.py", "--ranks", "2", "--run-dir", "out", "--set", "steps=6")
    assert ended.status == 0, ended.err
    said = ended.out + ended.err
    assert said.count("The image 'bad' is not recorded") == 1
    out = command.folder / "out"
    kinds = {"sub%2Fpicture": "png", "words": "txt", "table": "json"}
    expected = [f"{name}/{step}.{suffix}" for name, suffix in kinds.items() for step in (1, 5)]
    files = sorted(path.relative_to(out / "media").as_posix() for path in (out / "media").rglob("*.*"))
    assert files == sorted([*expected, "first/0.txt", "last/6.txt"])
    assert json.loads((out / "media/table/5.json").read_text())["data"][0][0] == 5
    lines = [line for line in read(out / "timeline" / "rank-0.jsonl") if "media" in line]
    histograms = [line for line in lines if line["media"] == "histogram"]
    sizes = [(line["step"], sum(line["counts"]), len(line["edges"])) for line in histograms]
    assert sizes == [(1, 128, 65), (5, 128, 65)]
    assert len(lines) == len(files) + 2
    assert not [line for line in read(out / "timeline" / "rank-1.jsonl") if "media" in line]
    command.script(SCRIPT)
    command.train("whole", "--set=steps=6")
    assert result(command, "out")["weights_sha256"] == result(command, "whole")["weights_sha256"]


@pytest.mark.slow
def test_another_process_continues_after_the_death_of_the_main_one(command: Command) -> None:
    command.script(DYING)
    words = ("--ranks", "3", "--run-dir", "out", "--set", "deaths=9:0", "--set", "track=csv", "--set", "pause=0.03")
    ended = command.run("run", "script.py", *words)
    assert ended.status == 0, ended.err
    assert [each["process"] for each in result(command, "out")["deaths"]] == [0]
    wait_for_trackers(command.folder / "out", ["csv"])
    assert steps_of(command, "out") == list(range(24))


@pytest.mark.slow
def test_trackers_that_fail_are_reported_once_and_training_continues(command: Command) -> None:
    (command.folder / "own.py").write_text(OWN)
    command.script(LOGGING)
    track = "own:Broken,own:Absent,csv,own:Ends"
    ended = command.run("run", "script.py", "--run-dir", "out", "--set", f"track={track}", "--set", "pause=0.03")
    assert ended.status == 0, ended.err
    said = ended.out + ended.err
    broken = "The tracker own:Broken failed at step 0: ValueError: no space for you. Training continues without it."
    absent = "The tracker own:Absent could not start: ConnectionError: nothing answers. Training continues without it."
    assert (said.count(broken), said.count(absent)) == (1, 1)
    assert steps_of(command, "out") == list(range(24))
    found = result(command, "out")
    steps = [(step, 0.5) for step in range(24)]
    expected = f"out 16 {steps} exact {found['weights_sha256']}"
    assert (command.folder / "out" / "ends.txt").read_text() == expected
    command.train("whole")
    assert found["weights_sha256"] == result(command, "whole")["weights_sha256"]


@pytest.mark.slow
def test_a_slow_tracker_does_not_hold_up_the_run(command: Command) -> None:
    (command.folder / "own.py").write_text(OWN)
    command.script(LOGGING)
    began = time.monotonic()
    ended = command.run("run", "script.py", "--run-dir", "out", "--set", "track=own:Slow", "--set", "pause=0.03")
    assert ended.status == 0, ended.err
    assert "did not finish within 10 s" in ended.out + ended.err
    assert result(command, "out")["seconds"] < 30
    assert time.monotonic() - began < 60


def test_a_tracker_that_is_unknown_is_one_message(command: Command) -> None:
    command.script(SCRIPT)
    ended = command.run("run", "script.py", "--run-dir", "out", "--set", "track=tensorbord")
    assert ended.status == 2
    assert "track = tensorbord names no tracker." in ended.err
    assert "track=tensorboard" in ended.last
    assert not (command.folder / "out").exists()


@pytest.mark.ci
def test_numbers_of_a_run_are_in_metrics_csv(command: Command) -> None:
    command.script(LOGGING)
    ended = command.run("run", "script.py", "--run-dir", "out", "--set", "track=csv", "--set", "steps=6", "--json")
    assert ended.status == 0, ended.err
    rows = [row.split(",") for row in (command.folder / "out" / "metrics.csv").read_text().splitlines()[1:]]
    assert float(rows[-1][3]) == 0.5
    assert float(rows[-2][3]) == json.loads(ended.out.splitlines()[-1])["loss"]
    assert {row[2] for row in rows} == {"loss", "lr"}


def test_a_long_text_is_shortened(command: Command) -> None:
    longest = "        run.log(text='é' * 10_000_000, words=['word'] * 1_000_000)\n        step.update("
    command.script(SCRIPT.replace("        step.update(", longest))
    command.train("out", "--set=steps=2")
    lines = [line["log"] for line in read(command.folder / "out" / "timeline" / "rank-0.jsonl") if "log" in line]
    assert lines[0] == {"text": "é" * 999 + "…", "words": str(["word"] * 1000)[:999] + "…"}
    assert result(command, "out")["text"] == "é" * 999 + "…"
    assert (command.folder / "out" / "report.html").stat().st_size < 1_000_000
