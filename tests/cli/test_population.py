"""`unisono tune --population`: a real population of a small script, killed and resumed, and wrong ones."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import PATIENCE_SECONDS, ROOT
from unisono.checkpoint.load import fingerprint
from unisono.environment import inherited

SCRIPT = """
import time
from dataclasses import dataclass, field
import torch
import unisono

@dataclass(frozen=True, kw_only=True)
class Settings(unisono.Settings):
    steps: int | None = 9
    batch: int = 16
    virtual_ranks: int = 4
    lr: float = 0.05
    width: int = 4
    kind: str = "sgd"
    scale: float = 1.0  # of the first weights
    schedule: str = ""  # STEP:LR,... by hand
    pause: float = field(default=0.0, metadata={"changes_bits": False})  # seconds after each step

def main(run):
    settings = run.settings

    def build():
        width = settings.width
        model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))
        torch.nn.init.normal_(model[0].weight, std=settings.scale)
        return model

    model = run.place(build)
    if settings.kind == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr)
    run.track(model=model, optimizer=optimizer)
    rates = dict(part.split(":") for part in settings.schedule.split(",") if part)
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    for step in run.steps(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))):
        for group in optimizer.param_groups:
            group["lr"] = float(rates.get(str(step.number), group["lr"]))
        step.run(model, lambda out, x, y: ((out - y).square().sum(), len(x)))
        step.update(optimizer)
        time.sleep(settings.pause)
        run.log(error=step.loss)

if __name__ == "__main__":
    unisono.main(main, Settings)
"""
POPULATION = ("--population", "3", "--interval", "3", "--minimize", "error", "--search", "lr=log(1e-4,0.2)")


class Study:
    """The command in a folder with the script."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "train.py").write_text(SCRIPT, encoding="utf-8")

    def start(self, *words: str, verb: str = "tune") -> subprocess.Popen[str]:
        """Start the command in a process group of its own."""
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "unisono.cli.main", verb, "train.py", *words],
            cwd=self.folder,
            env=inherited({"PYTHONPATH": path}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *words: str, verb: str = "tune") -> tuple[int, str]:
        """Run the command, and return its status and what it prints."""
        process = self.start(*words, verb=verb)
        out, err = process.communicate(timeout=3 * PATIENCE_SECONDS)
        return process.returncode, out + err

    def kill_when(self, is_time: Callable[[], bool], *words: str) -> None:
        """Run the command, and kill its process group at a moment."""
        process = self.start(*words)
        until = time.monotonic() + 2 * PATIENCE_SECONDS
        while not is_time():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < until
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()

    def segments(self, run_dir: str, step: int, name: str) -> list[Path]:
        """Return files of members from a step on."""
        return sorted((self.folder / run_dir / "members").glob(f"*/step-{step:08d}/{name}"))

    def result(self, run_dir: str) -> dict[str, Any]:
        """Return the result of a finished study."""
        found: dict[str, Any] = json.loads((self.folder / run_dir / "result.json").read_text())
        return found


@pytest.fixture
def study(tmp_path: Path) -> Study:
    return Study(tmp_path)


def without_run_ids(result: dict[str, Any]) -> dict[str, Any]:
    """Return a result without the digests of checkpoints, which contain the random id of a run."""
    rows = [row for generation in result["generations"] for row in generation["members"]] + result["members"]
    for row in rows:
        del row["began_with"], row["ended_with"]
    return result


def test_a_population_needs_flags_that_go_together(study: Study) -> None:
    status, screen = study.run(
        *POPULATION[4:], "--population", "1", "--trials", "5", "--pruner", "median", "--maximize", "loss"
    )
    assert status == 2
    for error in (
        "--population 1 is out of range.",
        "--trials does not go with --population.",
        "--pruner does not go with --population.",
        "--population needs --interval.",
        "A population has one objective.",
    ):
        assert error in screen
    assert not (study.folder / "runs").exists()


def test_a_population_that_cannot_work_is_refused_before_it_starts(study: Study) -> None:
    search = ("--search", "batch=[8,16]", "--search", "pause=[0.0,0.1]")
    status, screen = study.run(*POPULATION, *search, "--set", "steps=3")
    assert status == 2
    assert "batch cannot change while a run trains." in screen
    assert "No result depends on pause." in screen
    assert "--interval 3 is too long.\n  The run has 3 steps, so no member would copy another one." in screen
    assert not (study.folder / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("search", "facts"),
    [
        ("width=[2,4,8,16]", "Members have other parameters, by width."),
        ("kind=[sgd,adam]", "cannot continue the state of member"),
        ("scale=linear(0.5,1)", "scale has no effect while a run trains."),
    ],
)
def test_a_setting_that_cannot_change_while_a_run_trains_is_named(study: Study, search: str, facts: str) -> None:
    name = search.partition("=")[0]
    words = ("--population", "2", "--interval", "2", "--ranks", "2", "--search", search, "--set", "steps=4")
    status, screen = study.run(*words, "--resample", "0", "--study-seed", "21", "--run-dir", "out")
    assert status != 0, screen
    assert facts in screen
    assert f"{name}=" in screen
    assert not (study.folder / "out" / "result.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_population_that_is_killed_and_moved_has_the_same_members(study: Study) -> None:
    """On 2 processes undisturbed, and with two kills on 3, 1 and 2. Its schedule by hand gives the same weights."""
    status, screen = study.run(*POPULATION, "--ranks", "2", "--run-dir", "whole")
    assert status == 0, screen
    whole = study.result("whole")
    copies = [
        row for generation in whole["generations"] for row in generation["members"] if row["member"] != row["parent"]
    ]
    assert len(copies) == 2
    assert "2 copies." in screen
    assert f"member {copies[0]['member']} copies member {copies[0]['parent']}: lr " in screen
    assert "promise: exact" in screen

    again = ("--resume", "--run-dir", "out")
    slow = ("--set", "pause=0.2")
    study.kill_when(
        lambda: bool(study.segments("out", 0, "segment.json")), *POPULATION, *slow, "--ranks", "3", "--run-dir", "out"
    )
    study.kill_when(lambda: bool(study.segments("out", 3, "values/*")), *again, "--ranks", "1")
    assert study.segments("out", 3, "segment.json") == []
    status, screen = study.run(*again, "--ranks", "2")
    assert status == 0, screen
    killed = study.result("out")

    for result in (whole, killed):
        for before, after in zip(result["generations"], result["generations"][1:], strict=False):
            for row in after["members"]:
                assert row["began_with"] == before["members"][row["parent"]]["ended_with"]
    (copy,) = (row for row in killed["members"] if row["member"] != row["parent"])
    states = {
        fingerprint(study.folder / f"out/members/{member:02d}/step-00000006/checkpoints/step-00000006", state=True)[
            "state_sha256"
        ]
        for member in (copy["member"], copy["parent"])
    }
    assert len(states) == 1
    assert without_run_ids(killed) == without_run_ids(whole)

    schedule = ",".join(f"{period['step']}:{period['settings']['lr']}" for period in whole["schedule"])
    status, screen = study.run("--set", f"schedule={schedule}", "--run-dir", "alone", verb="run")
    assert status == 0, screen
    assert study.result("alone")["weights_sha256"] == whole["members"][whole["best"][0]]["weights_sha256"]

    status, screen = study.run(*again, "--population", "4")
    assert status == 2
    assert "The study in out has another population.\n  It was 3, and is 4." in screen
    assert study.run(*again, "--trials", "4")[0] == 2
