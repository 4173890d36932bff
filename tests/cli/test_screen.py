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


def terminal_output(folder: Path, *command: str, columns: int, **variables: str) -> str:
    """Run a command on a pseudo-terminal of this width, with these variables, and return its output."""
    reader, writer = os.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = inherited({"PYTHONPATH": str(ROOT), "TERM": "xterm", "NO_COLOR": "", "FORCE_COLOR": "", **variables})
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


def too_long(raw: str, columns: int) -> list[str]:
    """Return the lines that a terminal would wrap, except what is copied: a command, and words without a space."""
    plain = re.sub(r"\x1b\[[0-9;]*[a-zA-Z]", "", raw)
    lines = [line for line in re.split(r"[\r\n]+", plain) if len(line) > columns]
    return [line for line in lines if not re.match(r"\s*Next: |(run|run directory:) +\S+$|\s*\S+$", line)]


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
COMMAND = ("-P", "-m", "unisono.cli.main")
UNISONO = (*COMMAND, "run")
SHORT = ("wordy.py", "--ranks", "2", "--set", "steps=3", "--set", "batch=8", "--run-dir", "out")
COLOR = re.compile(r"\x1b\[[0-9;]*m")


@pytest.mark.slow
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


@pytest.mark.slow
def test_nothing_wraps_on_a_narrow_terminal(tmp_path: Path) -> None:
    (tmp_path / "wordy.py").write_text(WORDY)
    raw = terminal_output(tmp_path, *UNISONO, *SHORT, columns=60)
    assert "where the time went" in raw
    assert re.search(r"fingerprint.*  [0-9a-f]{47}\r\n {13}[0-9a-f]{17}\r\n", raw)
    assert too_long(raw, 60) == []


@pytest.mark.slow
@pytest.mark.parametrize("words", [("check", "wordy.py", "--set", "steps=3", "--set", "batch=8"), ("doctor",)])
def test_reports_do_not_wrap_on_a_narrow_terminal(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "wordy.py").write_text(WORDY)
    raw = terminal_output(tmp_path, *COMMAND, *words, columns=60)
    assert "equal" in raw or "Ready." in raw
    assert too_long(raw, 60) == []


@pytest.mark.ci
@pytest.mark.parametrize(
    ("variables", "colored"),
    [({}, True), pytest.param({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False, marks=pytest.mark.slow)],
)
def test_a_terminal_has_colors_unless_no_color_is_set(tmp_path: Path, variables: dict[str, str], colored: bool) -> None:
    (tmp_path / "wordy.py").write_text(WORDY)
    raw = terminal_output(tmp_path, *UNISONO, *SHORT, columns=80, **variables)
    assert bool(COLOR.search(raw)) == colored
    log = (tmp_path / "out" / "log" / "rank-0.log").read_text()
    assert "where the time went" in log
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", log)


@pytest.mark.ci
@pytest.mark.parametrize("force", ["", pytest.param("1", marks=pytest.mark.slow)])
def test_a_pipe_has_no_control_characters_unless_color_is_forced(tmp_path: Path, force: str) -> None:
    (tmp_path / "wordy.py").write_text(WORDY)
    environment = inherited({"PYTHONPATH": str(ROOT), "NO_COLOR": "", "FORCE_COLOR": force})
    done = subprocess.run(
        [sys.executable, *UNISONO, *SHORT],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=True,
    )
    assert "where the time went" in done.stdout
    assert bool(COLOR.search(done.stdout)) == bool(force)
    for text in (COLOR.sub("", done.stdout), done.stderr, *(p.read_text() for p in (tmp_path / "out/log").iterdir())):
        assert not re.search(r"[\x00-\x09\x0b-\x1f]", text)


def screen_of(raw: str) -> list[str]:
    """Return the lines that a terminal shows after this output."""
    lines, column = [""], 0
    for piece in re.findall(r"\x1b\[2K|\x1b\[[0-9;]*m|.", raw, re.DOTALL):
        if piece == "\n":
            lines.append("")
        elif piece == "\r":
            column = 0
        elif piece == "\x1b[2K":
            lines[-1] = ""
        elif not piece.startswith("\x1b"):
            lines[-1] = lines[-1][:column].ljust(column) + piece + lines[-1][column + 1 :]
            column += 1
    return lines


@pytest.mark.slow
def test_the_progress_line_makes_way_for_warnings(tmp_path: Path) -> None:
    warns = "        import logging, time, warnings\n        time.sleep(0.6)\n        warnings.warn('old')\n"
    warns += "        logging.getLogger('mine').error('careful')\n"
    (tmp_path / "wordy.py").write_text(WORDY.replace("        step.update", f"{warns}        step.update"))
    lines = screen_of(terminal_output(tmp_path, *UNISONO, *SHORT, columns=160))
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} rank 0 step \d"
    assert (
        sum(
            re.fullmatch(rf"{stamp} WARNING py.warnings: .*wordy.py:\d+: UserWarning: old", line) is not None
            for line in lines
        )
        == 1
    )
    assert sum(re.fullmatch(rf"{stamp} ERROR mine: careful", line) is not None for line in lines) == 3
    assert sum(line.startswith("step 3/3  loss ") for line in lines) == 1
