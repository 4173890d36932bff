"""`unisono replay` repeats a step in one process; `unisono audit` finds ranks that compute wrong results."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import ROOT, Command, last_json, start
from tests.cli.refused_requests import RequestProblems
from unisono import environment
from unisono.cli.commands.audit import HardwareAudit
from unisono.cli.commands.replay import Replay
from unisono.cli.compare.rerun import earlier
from unisono.config import CommandLine

SCRIPT = """
import json
from dataclasses import dataclass
from pathlib import Path

import torch
import unisono
from torch import nn


@dataclass(frozen=True, kw_only=True)
class Settings(unisono.Settings):
    batch: int = 8
    virtual_ranks: int = 4
    steps: int | None = 10
    bad: int = -1  # from this step on sample 7 has a loss that is no number
    wrong: int = -1  # the rank that computes wrongly


class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 22

    def __getitem__(self, i):
        return torch.randn(3) + i, torch.tensor(float(i))


def main(run):
    model = run.place(lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    losses = []
    for step in run.steps(Points()):
        for x, i in step:
            loss = (model(x)[:, 0] - i).square().sum()
            if step.number >= run.settings.bad >= 0 and 7.0 in i:
                loss = loss + (loss - loss) / 0.0
            if run.rank == run.settings.wrong:
                loss = loss * 1.000001
            step.backward(loss, len(i))
        step.update(optimizer)
        losses.append([step.loss])
    if run.is_main:
        (run.dir / "losses.json").write_text(json.dumps(losses))


unisono.main(main, Settings)
"""

LINE = CommandLine(("unisono", "replay", "out", "--step", "0"))


def train_script(folder: Path, ranks: int, *sets: str) -> list[list[float]]:
    """Train the script in folder/out and return its losses."""
    script, out = folder / "script.py", folder / "out"
    script.write_text(SCRIPT)
    out.mkdir()
    arguments = [f"--set={each}" for each in ("checkpoint.every=4", "checkpoint.keep=9", *sets)]
    start(script, [*arguments, f"--run-dir={out}"], ranks=ranks, logs=out)
    return list(json.loads((out / "losses.json").read_text()))


def replay_step(
    folder: Path, capsys: pytest.CaptureFixture[str], step: int, virtual_rank: int | None = None
) -> dict[str, Any]:
    again = replace(earlier(folder / "out", None, LINE), start=start)
    scratch = folder / f"scratch-{step}-{virtual_rank}"
    scratch.mkdir()
    replay = Replay(
        again=again,
        shown=Path("out"),
        step=step,
        virtual_rank=virtual_rank,
        debug=False,
        as_json=True,
        folder=scratch,
        line=LINE,
    )
    assert replay.run() == 0
    return dict(last_json(capsys.readouterr().out))


CHECKPOINTS_IN_KEPT = "checkpoint.dir=kept"


def written_files(folder: Path) -> dict[Path, int]:
    """Return the files of a run and of its checkpoints, with their times of modification."""
    return {path: path.stat().st_mtime_ns for name in ("out", "kept") for path in (folder / name).rglob("*")}


def test_a_replayed_step_has_the_same_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = train_script(tmp_path, 3, CHECKPOINTS_IN_KEPT)
    files = written_files(tmp_path)
    whole = replay_step(tmp_path, capsys, 6)
    assert [whole["loss"]] == losses[6]
    assert (whole["from_step"], whole["epoch"], whole["samples"]) == (4, 2, 8)
    rows = whole["micro_batches"]
    assert [row["virtual_rank"] for row in rows] == [0, 1, 2, 3]
    assert len({i for row in rows for i in row["samples"]}) == 8
    total = sum(row["loss"] * row["weight"] for row in rows)
    assert total / 8 == pytest.approx(whole["loss"])
    alone = replay_step(tmp_path, capsys, 6, 2)
    assert alone["micro_batches"] == [rows[2]]
    assert alone["loss"] is None
    assert [replay_step(tmp_path, capsys, 1)["loss"]] == losses[1], "before the first checkpoint"
    assert written_files(tmp_path) == files, "the run is only read"


def test_a_run_is_audited_from_its_newest_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_script(tmp_path, 2, "steps=5", CHECKPOINTS_IN_KEPT)
    files = written_files(tmp_path)
    again = replace(earlier(tmp_path / "out", None, LINE), start=start)
    audit = HardwareAudit(again=again, ranks=3, steps=3, as_json=True, folder=tmp_path / "audit", line=LINE)
    assert audit.run() == 0
    report = last_json(capsys.readouterr().out)
    assert [each["step"] for each in report["audits"]] == [6, 7, 8]
    assert all(len(each["ranks"]) == 3 for each in report["audits"])
    assert written_files(tmp_path) == files, "the run is only read"


@pytest.mark.slow
def test_a_nan_loss_proposes_a_replay(command: Command) -> None:
    (command.folder / "script.py").write_text(SCRIPT)
    ended = command.run("run", "script.py", "--ranks", "2", "--run-dir", "out", "--set", "bad=3")
    assert ended.status == 1
    advice = next(line for line in ended.err.splitlines() if "unisono replay" in line)
    words = advice.partition("unisono replay")[2].partition(";")[0].split()
    assert words[:2] == ["out", "--step"]
    seen = command.run("replay", *words, "--json")
    assert seen.status == 0, seen.err
    found = last_json(seen.out)
    assert [row["virtual_rank"] for row in found["micro_batches"]] == [int(words[-1])]
    assert found["micro_batches"][0]["loss"] == "NaN"
    assert 7 in found["micro_batches"][0]["samples"]
    assert found["micro_batches"][0]["bad"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    whole = command.run("replay", *words[:3])
    assert whole.status == 0, whole.err
    assert "not finite: the gradient of 0.weight and 3 others" in whole.out
    assert "The step raises an error, as in the run if it failed there" in whole.out


@pytest.mark.slow
def test_the_debugger_stops_at_the_micro_batch(command: Command) -> None:
    (command.folder / "script.py").write_text(SCRIPT)
    assert command.run("run", "script.py", "--run-dir", "out").status == 0
    arguments = ["replay", "out", "--step", "3", "--virtual-rank", "1", "--debug"]
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "unisono.cli.main", *arguments],
        cwd=command.folder,
        env=environment.inherited({"PYTHONPATH": str(ROOT)}),
        input="p step.number, x.shape, run.rank\nn\np loss.shape\nq\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "Step 3, virtual rank 1, micro-batch 0: samples " in ended.stdout
    assert "(3, torch.Size([2, 3]), 0)" in ended.stdout
    assert "torch.Size([])" in ended.stdout


@pytest.mark.slow
def test_an_audit_names_the_faulty_rank(command: Command) -> None:
    (command.folder / "script.py").write_text(SCRIPT)
    ended = command.run("audit", "script.py", "--steps", "4", "--set", "wrong=1", "--json")
    assert ended.status == 1, ended.err
    report = last_json(ended.out)
    assert (report["sound"], report["wrong"]) == (False, [1])
    assert "Rank 1 made another gradient than ranks" in report["message"]
    sound = command.run("audit", "script.py", "--steps", "4")
    assert sound.status == 0, sound.err
    assert sound.out == "4 virtual ranks computed again on 3 processes: all results are equal to the bit.\n"


@pytest.mark.parametrize(
    ("words", "message", "do"),
    [
        (["replay", "nothing", "--step", "3"], "nothing is not a run directory.", "unisono replay runs/"),
        (["replay", "run", "--step", "10"], "The run has 10 steps, 0 to 9.", "unisono replay run --step 9"),
        (["replay", "run", "--step", "1", "--virtual-rank", "8"], "8 virtual ranks", "unisono replay run --step 1 --v"),
        (
            ["replay", "local", "--step", "1"],
            "Its sites hold different weights",
            "look at its losses in local/timeline",
        ),
        (["audit", "run", "--set", "lr=1"], "with the settings that it had", "unisono audit run"),
        (
            ["audit", "train.py", "--set", "exchange=local_sgd"],
            "audit_every = 1 cannot be combined with exchange = local_sgd.",
            "unisono audit",
        ),
        (["audit", "odd"], "a script that it does not name", "unisono audit odd --json --script SCRIPT.py"),
        (
            ["audit", "odd", "--script", "no.py"],
            "There is no file no.py",
            "unisono audit odd --script SCRIPT.py --json",
        ),
        (["audit", "train.py", "--script", "no.py"], "train.py is not a run directory", "unisono audit train.py"),
        (["audit", "train.py", "--steps", "0"], "At least one step", "unisono audit train.py --steps 3"),
    ],
)
def test_wrong_requests(
    request_problems: RequestProblems, tmp_path: Path, words: list[str], message: str, do: str
) -> None:
    for name, exchange in (("run", "tree"), ("local", "local_sgd"), ("odd", "tree")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "settings.toml").write_text(f'steps = 10\nvirtual_ranks = 8\nexchange = "{exchange}"\n')
        about = {"script": str(tmp_path / "train.py"), "folder": str(tmp_path)}
        (tmp_path / name / "environment.json").write_text(json.dumps(about) if name != "odd" else "[]")
    problems = request_problems(*words)
    assert any(message in str(problem) and problem.remedy.startswith(do) for problem in problems), problems
