"""The ranks of a run in the terminal: one real run that is under way, and terminals that look at it."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import PATIENCE_SECONDS, ROOT, Command
from tests.cli.test_training import SCRIPT
from unisono.cli.main import main
from unisono.environment import inherited

COLUMNS = ["rank", "step", "steps/s", "wait", "memory", "mostly", "cores"]
"""Those of every run, in the order in which a narrow terminal keeps them."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """Start a run of two processes that takes long. Return its directory, once it has steps, and its launcher."""
    command = Command(tmp_path_factory.mktemp("top"))
    command.script(SCRIPT.replace("total_steps=24", "total_steps=100_000"))
    arguments = ("--ranks", "2", "--run-dir", "out", "--set", "pause=0.05", "--set", "steps=90000")
    launcher = command.start("run", "script.py", *arguments)
    command.wait_for("step 5 of 0", "step 5 of 1")
    run_dir = command.folder / "out"
    while not any(b'"processes"' in path.read_bytes() for path in run_dir.glob("timeline/host-*.jsonl")):
        assert launcher.poll() is None, launcher.communicate()
        time.sleep(0.02)
    yield run_dir, launcher
    launcher.terminate()
    launcher.communicate()
    command.close()


class Terminal:
    """A terminal of 30 lines in which `unisono top` runs."""

    def __init__(self, run_dir: Path, columns: int) -> None:
        self.keyboard, self._screen = pty.openpty()
        fcntl.ioctl(self._screen, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
        self.before = self.settings()
        self.text = ""
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "unisono.cli.main", "top", str(run_dir)],
            stdin=self._screen,
            stdout=self._screen,
            stderr=self._screen,
            env=inherited({"PYTHONPATH": str(ROOT), "TERM": "xterm"}),
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C is a signal
        )

    def settings(self) -> list[Any]:
        return termios.tcgetattr(self._screen)

    def show(self, times: int) -> None:
        """Wait until a first line that says "running" was shown this often."""
        until = time.monotonic() + PATIENCE_SECONDS
        while self.text.count(": running") < times:
            assert self.process.poll() is None, self.text
            assert time.monotonic() < until, self.text
            self._read(0.1)

    def end(self) -> int:
        """Wait until it ends by itself, and return the exit status."""
        until = time.monotonic() + PATIENCE_SECONDS
        while self.process.poll() is None:
            assert time.monotonic() < until, self.text
            self._read(0.1)
        while self._read(0):
            pass
        return self.process.returncode

    def _read(self, seconds: float) -> bool:
        if not select.select([self.keyboard], [], [], seconds)[0]:
            return False
        self.text += os.read(self.keyboard, 65536).decode(errors="replace")
        return True

    @property
    def lines(self) -> list[str]:
        """All lines that were shown, without the codes that move the cursor."""
        plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.text)
        return [line.rstrip() for line in re.split(r"[\r\n]+", plain)]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.keyboard)
        os.close(self._screen)


@pytest.fixture
def copy(running: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the run, as it is now, and make the output 120 columns wide."""
    monkeypatch.setenv("COLUMNS", "120")
    return Path(shutil.copytree(running[0], tmp_path / "copy", ignore=shutil.ignore_patterns("checkpoints")))


def add(path: Path, *lines: dict[str, Any] | bytes) -> None:
    """Append lines to a file."""
    with path.open("ab") as file:
        file.write(b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines))


def shown(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return what `unisono top` prints into a pipe."""
    assert main(["top", str(run_dir)]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("key", [b"q", b"\x03"], ids=["q", "Ctrl-C"])
def test_a_key_ends_it_and_restores_the_terminal(running: tuple[Path, Any], key: bytes) -> None:
    terminal = Terminal(running[0], 60)
    try:
        terminal.show(3)
        assert terminal.settings() != terminal.before
        os.write(terminal.keyboard, key)
        assert terminal.end() == 0
        assert terminal.settings() == terminal.before
        assert terminal.text.rfind("\x1b[?25h") > terminal.text.rfind("\x1b[?25l") >= 0  # the cursor is there again
        assert "Traceback" not in terminal.text
        assert max(map(len, terminal.lines)) <= 60
        steps = [int(line.split()[1]) for line in terminal.lines if line.startswith("   0 ")]
        assert steps[-1] > steps[0] > 0
    finally:
        terminal.close()


@pytest.mark.ci
def test_a_pipe_gets_the_rows_once(running: tuple[Path, Any], capsys: pytest.CaptureFixture[str]) -> None:
    head, names, *rows = shown(running[0], capsys)
    assert re.fullmatch(r"out: running, step \d+ of 90000, [\d.]+ samples/s", head)
    assert names.split() == [*COLUMNS, "host"]
    assert [row.split()[0] for row in rows] == ["0", "1"]
    for row in rows:
        values = dict(zip(("rank", "step", "steps/s", "wait", "memory", "unit"), row.split(), strict=False))
        assert 0.1 < float(values["steps/s"]) < 20  # 0.05 s a micro-batch
        assert 0 <= int(values["wait"].removesuffix("%")) <= 100
        assert float(values["memory"]) > 50
        assert values["unit"] == "MB"


def test_a_narrow_terminal_leaves_the_last_columns_out(
    copy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    for width in (80, 60, 40, 20):
        monkeypatch.setenv("COLUMNS", str(width))
        _, names, *rows = lines = shown(copy, capsys)
        assert max(len(line.rstrip()) for line in lines) <= width
        assert len(rows) == 2
        assert names.split() == [*COLUMNS, "host"][: len(names.split())]
        counts.append(len(names.split()))
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == 8
    assert counts[-1] == 3


def test_damaged_lines_are_skipped(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (host,) = copy.glob("timeline/host-*.jsonl")
    garbage = (b'\xff\xfe{"t": 1\n[1]\n5\n', b'\n{"seconds": 5}\n{"step": "x", "seconds": {}, "t": 1}\n')
    add(host, b"\n", *garbage, {"t": time.time(), "processes": [1], "devices": 5})
    add(host, {"t": time.time(), "processes": {"0": 7, "1": {"resident": "x", "cpu": 1.5}}, "devices": [3]})
    assert float(shown(copy, capsys)[2].split()[4]) > 50, "the memory of rank 0 in the sample before"
    add(host, {"t": time.time(), "processes": {"1": {"cpu": 1.5}}})
    add(copy / "timeline" / "rank-1.jsonl", b"\n", *garbage, b'{"step":')
    head, names, first, second = shown(copy, capsys)
    assert head.startswith("copy: running, step ")
    assert names.split() == [*COLUMNS, "host"]
    assert first.split()[4] == "–"  # the memory of rank 0
    assert second.split()[4] == "–"
    assert float(second.split()[2]) > 0.1  # steps/s
    assert second.split()[-2] == "1.5"  # cores


def test_an_accelerator_has_a_column(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (host,) = copy.glob("timeline/host-*.jsonl")
    timeline = copy / "timeline" / "rank-1.jsonl"
    start = next(
        entry for entry in map(json.loads, timeline.read_bytes().splitlines()) if entry.get("event") == "start"
    )
    add(timeline, b"\n", start | {"device": "cuda:1"})
    device = {"index": 1, "utilization": 0.87, "memory": 12e9, "celsius": 61}
    add(host, b"\n", {"t": time.time(), "devices": [{"index": 0, "utilization": 0.1}, device]})
    _, names, first, second = shown(copy, capsys)
    assert names.split() == [*COLUMNS, "device", "host"]
    assert "87% 12 GB 61 °C" in second
    assert "%" not in first.partition("%")[2]


def test_names_are_no_markup_and_control_nothing(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timeline = copy / "timeline" / "rank-1.jsonl"
    start = next(
        entry for entry in map(json.loads, timeline.read_bytes().splitlines()) if entry.get("event") == "start"
    )
    add(timeline, b"\n", start | {"host": "[/red]a\x1b[2J"})
    renamed = copy.rename(copy.with_name("[bold]x\x1b[31m\n"))
    head, _, _, second = shown(renamed, capsys)
    assert head.startswith("[bold]x\\x0a: running")
    assert second.endswith("[/red]a\\x1b[2J")


def test_a_long_step_is_not_the_end(
    copy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The samples of the host show that the processes live, and the first line shows how old the last step is."""
    (host,) = copy.glob("timeline/host-*.jsonl")
    later = time.time() + 100
    monkeypatch.setattr(time, "time", lambda: later)
    assert shown(copy, capsys)[0].startswith("copy: ended without a result, step ")
    os.utime(host, (later, later))
    assert re.fullmatch(r"copy: running, step \d+ of 90000, 1\d\d s ago", shown(copy, capsys)[0])


def test_a_run_without_steps_is_not_the_end(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(copy / "timeline")
    os.utime(copy / "settings.toml")
    head, names = shown(copy, capsys)
    assert head == "copy: running, step 0 of 90000"
    assert names.split() == [*COLUMNS, "host"]


def test_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", str(tmp_path / "nothing")]) == 2
    assert f"There is no run {tmp_path / 'nothing'}." in capsys.readouterr().err


def test_the_result_of_the_run_ends_it(running: tuple[Path, subprocess.Popen[str]]) -> None:
    """This ends the run of these tests, so it is the last one."""
    run_dir, launcher = running
    terminal = Terminal(run_dir, 100)
    try:
        terminal.show(2)
        launcher.terminate()
        assert terminal.end() == 0
        assert terminal.settings() == terminal.before
        assert any(line.startswith("out: stopped, step ") for line in terminal.lines)
    finally:
        terminal.close()
    assert (run_dir / "result.json").exists()
