"""The output of a run on a terminal."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tests.cli.command import PATIENCE_SECONDS, ROOT
from unisono.environment import inherited


def terminal_output(folder: Path, *command: str, columns: int) -> str:
    """Run a command on a pseudo-terminal of this width and return its output."""
    reader, writer = os.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = inherited({"PYTHONPATH": str(ROOT), "TERM": "xterm"})
    running = subprocess.Popen([sys.executable, *command], cwd=folder, env=environment, stdout=writer, stderr=writer)
    os.close(writer)
    raw = b""
    try:
        while data := os.read(reader, 1 << 16):
            raw += data
    except OSError:  # Linux reports EIO when the last writer has closed the terminal
        pass
    finally:
        os.close(reader)
        status = running.wait(PATIENCE_SECONDS)
    assert status == 0, raw.decode()
    return raw.decode()


WORDY = """
import torch, unisono

def main(run):
    x = torch.ones(64, 1)
    model = run.place(lambda: torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(torch.utils.data.TensorDataset(x, x)):
        for inputs, targets in step:
            step.backward(((model(inputs) - targets) ** 2).sum(), weight=len(inputs))
        step.update(optimizer)
        run.log(**{f"a_number_with_a_name_{n}": n for n in range(4)})

unisono.main(main)
"""
UNISONO = ("-P", "-m", "unisono.cli.main", "run")


@pytest.mark.parametrize("columns", [44, pytest.param(160, marks=pytest.mark.slow)])
def test_the_progress_line_fits_the_width_of_the_terminal(tmp_path: Path, columns: int) -> None:
    (tmp_path / "wordy.py").write_text(WORDY)
    words = [*UNISONO, "wordy.py", "--set", "steps=3", "--set", "batch=8", "--run-dir", "out"]
    raw = terminal_output(tmp_path, *words, columns=columns)
    plain = re.sub(r"\x1b\[[0-9;]*[a-zA-Z]", "", raw)
    widths = [len(line) for line in re.findall(r"step \d+/3.*?(?=\r)", plain)]
    assert max(widths) < columns
    assert max(widths) > columns - 40  # a value is left out only if it does not fit
    log = (tmp_path / "out" / "log" / "rank-0.log").read_text()
    assert len(re.findall(r"^step \d+/3", log, re.MULTILINE)) == 1  # the last step, once
