"""Runs with trackers: kills, resumes, deaths, and trackers that fail or are slow."""

from __future__ import annotations

import json
import random
import time

import pytest

from tests.cli.command import Command
from tests.cli.test_deaths import DYING
from tests.cli.test_training import SCRIPT, kill_process_tree, result

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


def steps_of(command: Command, run_dir: str) -> list[int]:
    """Return the steps of the loss in metrics.csv."""
    rows = (command.folder / run_dir / "metrics.csv").read_text().splitlines()[1:]
    return [int(row.split(",")[0]) for row in rows if row.split(",")[2] == "loss"]


@pytest.mark.slow
def test_every_step_is_there_once_after_kills_and_resumes(command: Command) -> None:
    command.script(LOGGING)
    rng = random.Random(5)
    words = ["run", "script.py", "--ranks", "2", "--run-dir", "out", "--set", "track=csv", "--set", "pause=0.03"]
    for number in range(4):
        launcher = command.start(*words, *(["--resume"] if number else []))
        if number == 3:
            break
        timeline = command.folder / "out" / "timeline" / "rank-0.jsonl"
        before = timeline.stat().st_size if timeline.exists() else 0
        while not timeline.exists() or timeline.stat().st_size <= before:
            assert launcher.poll() is None, launcher.communicate()
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 0.6))
        kill_process_tree(launcher)
        launcher.communicate()
    ended = command.end(launcher)
    assert ended.status == 0, ended.err
    assert steps_of(command, "out") == list(range(24))


@pytest.mark.slow
def test_another_process_continues_after_the_death_of_the_main_one(command: Command) -> None:
    command.script(DYING)
    words = ("--ranks", "3", "--run-dir", "out", "--set", "deaths=9:0", "--set", "track=csv", "--set", "pause=0.03")
    ended = command.run("run", "script.py", *words)
    assert ended.status == 0, ended.err
    assert [each["process"] for each in result(command, "out")["deaths"]] == [0]
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


def test_numbers_of_a_run_are_in_metrics_csv(command: Command) -> None:
    command.script(LOGGING)
    ended = command.run("run", "script.py", "--run-dir", "out", "--set", "track=csv", "--set", "steps=6", "--json")
    assert ended.status == 0, ended.err
    rows = [row.split(",") for row in (command.folder / "out" / "metrics.csv").read_text().splitlines()[1:]]
    assert float(rows[-1][3]) == 0.5
    assert float(rows[-2][3]) == json.loads(ended.out.splitlines()[-1])["loss"]
    assert {row[2] for row in rows} == {"loss", "lr"}
