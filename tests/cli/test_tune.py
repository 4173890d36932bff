"""`unisono tune`: real studies of a small script, what is wrong with them, and what stops and continues them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import PATIENCE_SECONDS, ROOT
from unisono.environment import inherited

pytest.importorskip("optuna")

SCRIPT = """
import os, shutil, sqlite3, time
from dataclasses import dataclass, field
from pathlib import Path
import torch
import unisono

@dataclass(frozen=True, kw_only=True)
class Settings(unisono.Settings):
    steps: int | None = 8
    batch: int = 16
    virtual_ranks: int = 4
    lr: float = 0.05
    kind: str = "good"
    pause: float = field(default=0.0, metadata={"changes_bits": False})  # seconds after each step
    fault: str = field(default="", metadata={"changes_bits": False})  # happens once in a study

def act(kind, path, seconds="0"):
    try:
        Path("done").touch(exist_ok=False)
    except FileExistsError:
        return
    if kind == "remove":
        shutil.rmtree(path) if Path(path).is_dir() else os.unlink(path)
    elif kind == "lock":
        connection = sqlite3.connect(path, isolation_level=None)
        connection.execute("BEGIN EXCLUSIVE")
        time.sleep(float(seconds))
        connection.close()
    elif kind == "stay":
        time.sleep(float(seconds))  # until a signal comes

def main(run):
    settings = run.settings
    model = run.place(lambda: torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr)
    run.track(model=model, optimizer=optimizer)
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    nan = float("nan") if settings.kind == "nan" else 1.0
    for step in run.steps(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))):
        factor = nan if step.number == 3 else 1.0
        step.run(model, lambda out, x, y: (factor * (out - y).square().sum(), len(x)))
        if settings.kind == "crash" and step.number == 4:
            raise RuntimeError("the data is gone")
        step.update(optimizer)
        time.sleep(settings.pause)
        if settings.fault and step.number == 2 and run.is_main:
            act(*settings.fault.split("="))
        if settings.kind != "silent":
            run.log(error=step.loss)
        if settings.kind == "infinite" and step.number == 5:
            run.log(error=float("inf"))

if __name__ == "__main__":
    unisono.main(main, Settings)
"""
LR = ("--search", "lr=log(1e-3,1)", "--trials", "2", "--round-size", "2")


class Study:
    """The command in a folder with the script."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "train.py").write_text(SCRIPT, encoding="utf-8")

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start the command as a terminal does: in a process group of its own."""
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "unisono.cli.main", "tune", "train.py", *words],
            cwd=self.folder,
            env=inherited({"PYTHONPATH": path}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *words: str) -> tuple[int, str]:
        """Run the command, and return its status and what it prints."""
        process = self.start(*words)
        out, err = process.communicate(timeout=2 * PATIENCE_SECONDS)
        return process.returncode, out + err

    def trials(self, run_dir: str) -> list[dict[str, Any]]:
        """Return the trials of a finished study."""
        found: list[dict[str, Any]] = json.loads((self.folder / run_dir / "result.json").read_text())["trials"]
        return found


@pytest.fixture
def study(tmp_path: Path) -> Study:
    return Study(tmp_path)


def results(trials: Sequence[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return what must not depend on processes, kills and databases."""
    kept = ("trial", "state", "settings", "values", "steps", "total", "reason", "promise", "weights_sha256")
    return [tuple(trial.get(name) for name in kept) for trial in trials]


def test_wrong_searches_are_named_together(study: Study) -> None:
    search = ("kind=[]", "lr=log(1,1e-3)", "batch=linear(2,2)", "seed=lgo(1,2)")
    status, screen = study.run(*(word for each in search for word in ("--search", each)), "--trials", "0")
    assert status == 2
    for fact in (
        "The list is empty.",
        "The range is reversed: 1 is more than 0.001.",
        "The range is empty: both ends are 2.",
    ):
        assert fact in screen
    assert "There is no range lgo" in screen
    assert "--trials 0 is out of range." in screen
    assert not (study.folder / "runs").exists()


def test_an_unknown_setting_and_a_missing_package_are_named(study: Study) -> None:
    status, screen = study.run("--search", "lrr=log(1e-3,1)")
    assert (status, screen.splitlines()[:2]) == (2, ["There is no setting lrr.", "  The nearest name is lr."])
    assert "--search 'lr=log(0.001,1)'" in screen
    assert not (study.folder / "runs").exists()


@pytest.mark.slow
def test_trials_that_fail_are_named_and_the_study_continues(study: Study) -> None:
    search = ("--search", "kind=[good,crash,nan,silent,infinite]", "--sampler", "grid", "--round-size", "5")
    status, screen = study.run(*search, "--trials", "5", "--minimize", "error", "--ranks", "2", "--run-dir", "out")
    assert status == 0, screen
    found = {trial["settings"]["kind"]: trial for trial in study.trials("out")}
    assert found["good"]["state"] == "complete"
    assert {kind: (each["state"], each["reason"], each["steps"]) for kind, each in found.items() if kind != "good"} == {
        "crash": ("failed", "the data is gone", 4),
        "nan": ("failed", "Step 3 has a loss of nan.", 3),
        "silent": ("failed", "It never logs error; it logs loss.", 8),
        "infinite": ("failed", "error is inf at step 5: the trial diverges.", 6),
    }
    assert "5 trials: 1 complete, 0 pruned, 4 failed. Pruning saved 0% of the steps." in screen
    other = study.run("--resume", "--run-dir", "out", "--search", "kind=[good,crash]")
    assert other[0] == 2
    assert "The study in out has another search." in other[1]


@pytest.mark.slow
def test_a_metric_that_no_trial_logs_ends_the_study(study: Study) -> None:
    words = ("--search", "kind=[silent,good]", "--sampler", "grid", "--minimize", "accuracy", "--ranks", "2")
    status, screen = study.run(*words, "--trials", "2", "--round-size", "1", "--run-dir", "out")
    assert (status, len(list((study.folder / "out" / "trials").iterdir()))) == (2, 1)
    assert "The script never logs accuracy." in screen
    again = study.run("--resume", "--run-dir", "out")
    assert again[0] == 2
    assert "Next: unisono tune train.py --search 'kind=[silent,good]' --minimize" in again[1]
    assert study.run("--search", "kind=[crash]", "--trials", "1", "--run-dir", "b")[1].splitlines()[-3:-1] == [
        "No trial has completed.",
        "  1 trial failed, the last one: the data is gone",
    ]


@pytest.mark.ci
def test_a_study_continues_after_ctrl_c(study: Study) -> None:
    process = study.start(*LR, "--ranks", "2", "--run-dir", "out", "--set", "fault=stay=2")
    while not (study.folder / "done").exists():
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to all processes
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1, out + err
    assert "Stopped: trials that run are saved." in err
    assert "--run-dir out --resume" in err

    status, screen = study.run("--resume", "--run-dir", "out", "--ranks", "3")
    assert status == 0, screen
    alone = study.run(*LR, "--ranks", "2", "--run-dir", "alone")
    assert alone[0] == 0, alone[1]
    assert results(study.trials("out")) == results(study.trials("alone"))


@pytest.mark.slow
def test_a_study_continues_without_its_journal(study: Study) -> None:
    words = ("--search", "kind=[good,crash]", "--sampler", "grid", "--trials", "2", "--ranks", "2")
    status, screen = study.run(*words, "--minimize", "error", "--run-dir", "out")
    assert status == 0, screen
    expected = results(study.trials("out"))
    journal = study.folder / "out" / "study.journal"
    journal.write_bytes(journal.read_bytes()[:-9])  # the disk was full
    assert study.run("--resume", "--run-dir", "out")[0] == 0
    assert results(study.trials("out")) == expected
    journal.unlink()
    result = next((study.folder / "out").glob("trials/*/result.json"))
    result.unlink()  # the trial was killed after its last step
    status, screen = study.run("--resume", "--run-dir", "out")
    assert status == 0, screen
    assert "has no study out: its trials are read from out/trials." in screen
    assert results(study.trials("out")) == expected
    shutil.rmtree(study.folder / "out")
    status, screen = study.run("--resume", "--run-dir", "out")
    assert status == 2
    assert "Nothing to resume." in screen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "status", "facts"),
    [
        ("lock=study.db=2", 0, "2 complete"),
        ("remove=study.db", 1, "study.db: it was removed while the study was running."),
        ("remove=out", 1, "The folder of the study is gone."),
    ],
    ids=["locked", "removed", "folder"],
)
def test_a_database_that_is_locked_or_gone_is_named(study: Study, fault: str, status: int, facts: str) -> None:
    words = (*LR, "--ranks", "2", "--run-dir", "out", "--storage", "sqlite:///study.db", "--set", f"fault={fault}")
    found, screen = study.run(*words)
    assert found == status, screen
    assert facts in screen
    if fault == "remove=study.db":
        status, screen = study.run("--resume", "--run-dir", "out")
        assert status == 0, screen
        assert [trial["state"] for trial in study.trials("out")] == ["complete"] * 2


@pytest.mark.slow
def test_a_database_that_stays_locked_is_named(
    study: Study, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from unisono.cli.main import main
    from unisono.cli.tuning import study_storage

    monkeypatch.chdir(study.folder)
    monkeypatch.setattr(study_storage, "PATIENCE_SECONDS", 0.2)
    words = ["--search", "lr=log(1e-3,1)", "--trials", "1", "--storage", "sqlite:///study.db", "--run-dir", "out"]
    assert main(["tune", "train.py", *words, "--set", "fault=lock=study.db=2"]) == 1
    screen = capsys.readouterr().err
    assert "sqlite:///study.db: (sqlite3.OperationalError) database is locked." in screen
    assert "--run-dir out --resume" in screen
    assert main(["tune", "train.py", "--resume", "--run-dir", "out"]) == 0
    assert [trial["state"] for trial in study.trials("out")] == ["complete"]


@pytest.mark.slow
def test_a_trial_that_moves_has_the_same_bits(
    study: Study, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from unisono.cli.main import main
    from unisono.cli.tuning.round_plan import MoveTimes

    monkeypatch.chdir(study.folder)
    monkeypatch.setattr(MoveTimes, "expected_seconds", 0.0)  # every move seems to save time
    words = ["--search", "steps=[3,40]", "--sampler", "grid", "--trials", "2", "--round-size", "2", "--ranks", "2"]
    words += ["--set", "pause=0.5", "--set", "checkpoint.every=5"]
    assert main(["tune", "train.py", *words, "--run-dir", "moving"]) == 0
    assert "moves from 1 to 2 processes" in capsys.readouterr().out
    found = json.loads((study.folder / "moving" / "result.json").read_text())
    assert found["moves"] == 1
    assert found["move_seconds"] > 0
    assert main(["tune", "train.py", *words, "--run-dir", "fixed", "--no-move"]) == 0
    assert json.loads((study.folder / "fixed" / "result.json").read_text())["moves"] == 0
    assert results(study.trials("moving")) == results(study.trials("fixed"))
