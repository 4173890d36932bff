"""`unisono scale` as a user types it: real processes, bad requests, and the page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.command import Command
from unisono.cli.main import main

SCRIPT = """
import torch
import unisono
from torch import nn

def main(run):
    model = run.place(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(torch.utils.data.TensorDataset(torch.ones(64, 4))):
        for (x,) in step:
            step.backward(model(x).sum(), weight=len(x))
        step.update(optimizer)

unisono.main(main)
"""


@pytest.mark.ci
def test_two_curves_and_a_page(command: Command) -> None:
    command.script(SCRIPT)
    flags = ["--ranks", "1,2", "--steps", "4", "--rounds", "1", "--set", "batch=8", "--set", "epochs=1"]
    ended = command.run("scale", "script.py", *flags, "--set", "virtual_ranks=2", "--json")
    assert ended.status == 0, ended.err
    found = json.loads(ended.out.splitlines()[-1])
    for kind, samples in (("strong", [8, 8]), ("weak", [8, 16])):
        points = found[kind]
        assert [point["processes"] for point in points] == [1, 2]
        assert [point["samples"] for point in points] == samples
        assert all(abs(sum(p["lost"].values()) - (1 - p["efficiency"])) < 1e-9 for p in points)
    assert '"kind":"scaling"' in Path(command.folder, "runs", "script-scale.html").read_text().replace(" ", "")
    assert [path.name for path in Path(command.folder, "runs").iterdir()] == ["script-scale.html"]


@pytest.mark.ci
def test_a_script_with_too_few_steps_and_virtual_ranks(command: Command) -> None:
    command.script(SCRIPT)
    few = command.run(
        "scale", "script.py", "--ranks", "1,2", "--set", "batch=32", "--set", "epochs=1", "--only", "strong"
    )
    assert few.status == 2
    assert "script.py made too few steps.\n  It made 2 steps, and 12 are measured." in few.err
    many = command.run("scale", "script.py", "--ranks", "1,4", "--set", "virtual_ranks=2", "--set", "epochs=1")
    assert many.status == 2
    assert "virtual_ranks" in many.err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--ranks", "2"], "--ranks 2 is no list to compare"),
        (["--ranks", "1,x"], "--ranks 1,x is no list to compare"),
        (["--ranks", "0,1"], "--ranks 0,1 is no list to compare"),
        (["--steps", "2"], "--steps 2 is out of range.*first 2 steps are not timed"),
        (["--rounds", "0"], "--rounds 0 is out of range"),
        (["--page", "nowhere/x.html"], "Cannot write nowhere/x.html.*no folder nowhere"),
        (["--resume"], "--resume cannot be combined with unisono scale"),
        (["--only", "both"], "both"),
    ],
)
def test_wrong_flags(
    flags: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    assert main(["scale", "train.py", *flags]) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert re.search(words, text), text
    assert "Next: " in text
