"""`unisono doctor --rehearse`: the failures that it injects, and its report of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.command import Command
from unisono.cli.commands.rehearse import RUN_SETS, SCENARIOS, FaultScenario, Rehearsal
from unisono.cli.request.run_options import RunRequest
from unisono.config import CommandLine

SCRIPT = """
import torch

def main(run):
    data = torch.utils.data.TensorDataset(torch.arange(96.0).view(24, 4) / 96, torch.arange(24) % 3)
    model = run.place(lambda: torch.nn.Linear(4, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(data):
        for x, y in step:
            step.backward(torch.nn.functional.cross_entropy(model(x), y, reduction="sum"), len(y))
        step.update(optimizer)

unisono.main(main)
"""

NEVER = FaultScenario("a failure after the end", ("FailAt step=500 phase=forward",))
FULL = next(scene for scene in SCENARIOS if scene.name == "the disk is full at a checkpoint")
UNSEEN = FaultScenario(
    "a silent error", ("BitFlip step=6 phase=update of=gradient rank=1", "BitFlip step=7 of=weights")
)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rehearsal_reports_skipped_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The disk stays full until the asynchronous writer needs it. A failure that never happens is not counted."""
    (tmp_path / "script.py").write_text("import unisono\n" + SCRIPT)
    request = RunRequest(sets=("batch=8", *RUN_SETS))
    line = CommandLine(("unisono",))
    rehearsal = Rehearsal(
        script=tmp_path / "script.py",
        threads=1,
        ranks=2,
        request=request,
        line=line,
        folder=tmp_path,
        scenes=(NEVER, FULL),
    )
    assert rehearsal.play() == 0
    text = capsys.readouterr().out
    assert text.startswith("2 failures, each in one or two runs of 8 steps.")
    assert re.search(r"so all runs take \d+ to \d+ (s|minutes)\.\n", text), text
    assert re.search(r"skipped +a failure after the end +the run never reaches this failure", text), text
    assert re.search(r"survived +the disk is full at a checkpoint +ended \(.*\), continued with --resume", text), text
    assert text.endswith("1 of 1 survived.\n")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rehearsal_reports_survived_and_lost_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "script.py").write_text("import unisono\n" + SCRIPT)
    killed, hangs = SCENARIOS[0], next(scene for scene in SCENARIOS if scene.name == "a process hangs")
    request = RunRequest(sets=("batch=8", *RUN_SETS), json=True)
    rehearsal = Rehearsal(
        script=tmp_path / "script.py",
        threads=1,
        ranks=2,
        request=request,
        as_json=True,
        line=CommandLine(("unisono",)),
        folder=tmp_path,
        scenes=(killed, hangs, UNSEEN),
    )
    status = rehearsal.play()
    report = json.loads(capsys.readouterr().out)
    found = {played["scene"]: played for played in report["scenes"]}
    assert found[killed.name]["survived"]
    assert found[killed.name]["how"] == "the other processes finished the step"
    assert found[killed.name]["seconds"] > 0
    assert found[hangs.name]["survived"]
    assert "rank 1: it sleeps" in found[hangs.name]["how"]
    assert status == (0 if report["survived"] else 1)


def test_wrong_requests_of_a_rehearsal(command: Command) -> None:
    ended = command.run("doctor", "--ranks", "3")
    assert ended.status == 2
    assert "These flags need --rehearse." in ended.err
    command.script(SCRIPT)
    ended = command.run("doctor", "--rehearse", "script.py", "--ranks", "1")
    assert ended.status == 2
    assert "A rehearsal needs at least 2 processes." in ended.err
    ended = command.run("doctor", "--rehearse", "scripd.py")
    assert ended.status == 2
    assert "There is no recipe or script scripd.py.\n" in ended.err
    assert "Next: unisono doctor --rehearse script.py" in ended.err
