"""`unisono.launch` from a notebook, a script and the prompt has the bits of `unisono run`."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.cli.command import ROOT, Command

CELL = """
from dataclasses import dataclass, field

import torch
import unisono
from torch import nn


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    width: int = 8


@dataclass(frozen=True, kw_only=True)
class Settings(unisono.Settings):
    steps: int | None = 3
    batch: int = 16
    model: ModelSettings = field(default_factory=ModelSettings)


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, width), nn.Dropout(0.2), nn.Linear(width, 1))

    def forward(self, x):
        return self.layers(x)


def main(run):
    model = run.place(lambda: Model(run.settings.model.width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    points = torch.randn(64, 6, generator=torch.Generator().manual_seed(5))
    for step in run.steps(torch.utils.data.TensorDataset(points)):
        for (x,) in step:
            step.backward((model(x) - x.sum(1, keepdim=True)).square().sum(), weight=len(x))
        step.update(optimizer)
"""

FAILS = """
def fails(run):
    main(run)
    assert run.rank == 0, "rank one is here"


try:
    unisono.launch(fails, Settings(), ranks=2, run_dir="fails")
except unisono.RankFailedError as error:
    print(error.rank, error.kind, 'assert run.rank == 0, "rank one is here"' in str(error))
"""

REFUSED = """
try:
    unisono.main(main, Settings)
except unisono.SettingsError as error:
    print(error.problems[0].remedy)
"""


def command_fingerprint(command: Command) -> str:
    """Return the fingerprint of `unisono run script.py` with a width of 4."""
    (command.folder / "script.py").write_text(
        f"{CELL}\n\nif __name__ == '__main__':\n    unisono.main(main, Settings)\n"
    )
    command.train("alone", "--set=model.width=4")
    return fingerprint(command.folder / "alone")


def fingerprint(run_dir: Path) -> str:
    return str(json.loads((run_dir / "result.json").read_text())["weights_sha256"])


def output_of(cell: Any) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


@pytest.mark.slow
def test_a_notebook_has_the_bits_of_the_command(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(command.folder))
    launch = 'unisono.launch(main, Settings(model=ModelSettings(width=4)), ranks=2, run_dir="both")'
    again = 'unisono.launch(main, Settings(steps=5), ranks=1, run_dir="both", resume=True)["steps"]'
    cells = [CELL, f'result = {launch}\nprint(result["weights_sha256"])', again, FAILS, REFUSED]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(command.folder)}}).execute()
    trained, resumed, failed, refused = notebook.cells[1:]
    *printed, last = output_of(trained).splitlines()
    assert last == command_fingerprint(command)
    (progress,) = [output.data for output in trained.outputs if output.output_type == "display_data"]
    assert progress["text/plain"].startswith("step 3/3  loss ")
    assert '<progress value="3" max="3"' in progress["text/html"]
    assert "run directory: both" in printed
    assert not [line for line in printed if "step " in line or "\r" in line or "\x1b" in line]
    assert resumed.outputs[-1]["data"]["text/plain"] == "5"
    assert output_of(failed).splitlines()[-1] == "1 AssertionError True"
    assert output_of(refused) == "unisono.launch(main, Settings(steps=100), ranks=2) (docs/start/notebooks.md)\n"


@pytest.mark.slow
def test_a_script_and_the_prompt_have_the_bits_of_the_command(command: Command) -> None:
    call = "unisono.launch(main, Settings(model=ModelSettings(width=4)), ranks=2, run_dir='{}')"
    (command.folder / "launching.py").write_text(f"{CELL}\n{call.format('script')}\n")
    ended = command.end(command.start_python("launching.py"))
    assert ended.status == 0, ended.err
    prompt = f"exec({CELL!r})\n{call.format('prompt')}"
    ended = command.end(command.start_python("-c", prompt))
    assert ended.status == 0, ended.err
    assert {fingerprint(command.folder / name) for name in ("script", "prompt")} == {command_fingerprint(command)}


STOPPED = """
import os, sys

def waits(run):
    def say_step(step):
        if step.number == 2 and run.is_main:
            os.write(os.open("alive", os.O_WRONLY), b"ready\\n")
        return step
    model = run.place(lambda: nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(None):
        for numbers in step:
            step.backward(model(torch.ones(len(numbers), 6)).sum(), weight=len(numbers))
        step.update(optimizer)
        say_step(step)

try:
    unisono.launch(waits, Settings(steps=10**9), ranks=2, run_dir="stopped")
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.slow
def test_ctrl_c_saves_and_is_raised(command: Command) -> None:
    (command.folder / "launching.py").write_text(CELL + STOPPED)
    running = command.start_python("launching.py")
    command.wait_for("ready")
    running.send_signal(signal.SIGINT)
    ended = command.end(running)
    assert ended.status == 0, ended.err
    assert ended.out.splitlines()[-1] == "interrupted"
    assert "resume=True" in ended.last
    assert json.loads((command.folder / "stopped" / "result.json").read_text())["stopped"] is True
    assert list((command.folder / "stopped" / "checkpoints").glob("step-*"))


def test_wrong_arguments_are_refused_before_the_start(command: Command) -> None:
    calls = ["Settings(batch=0)", "Settings(), ranks=99", "Settings(), resume=True", "Settings(), ranks='two'"]
    text = "import threading\nlock = threading.Lock()\ndef locked(run): lock.acquire()\n"
    for call in (*(f"main, {call}" for call in calls), "locked, Settings()", "main, 'a string'"):
        text += f"try: unisono.launch({call})\nexcept unisono.SettingsError as error: print(error.problems[0].remedy)\n"
    (command.folder / "launching.py").write_text(f"{CELL}\n{text}")
    ended = command.end(command.start_python("launching.py"))
    assert ended.status == 0, ended.err
    assert ended.out.splitlines() == [
        "unisono.launch(main, Settings(batch=16), ranks=1)",
        "unisono.launch(main, settings, ranks=8), or (other bits): "
        "unisono.launch(main, Settings(virtual_ranks=99, batch=99), ranks=99)",
        "unisono.launch(main, settings, ranks=1) (from the start), or: "
        "unisono.launch(main, settings, ranks=1, run_dir='DIR', resume=True)",
        "unisono.launch(main, settings, ranks=2)",
        "open files, locks and the like inside the function instead.",
        "unisono.launch(main, Settings(steps=100), ranks=1)",
    ]
    assert not (command.folder / "runs").exists()


def test_launch_is_a_function() -> None:
    import unisono

    assert callable(unisono.launch)
