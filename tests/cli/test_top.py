"""The ranks of a run in the terminal."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.cli.command import Command
from tests.cli.test_training import SCRIPT


@pytest.fixture
def running(command: Command) -> Iterator[Command]:
    """Start a run of two processes that takes long, and wait for its first steps."""
    command.script(SCRIPT)
    launcher = command.start(
        *("run", "script.py", "--ranks", "2", "--run-dir", "out", "--set", "pause=0.3", "--set", "steps=1000")
    )
    timelines = [command.folder / "out" / "timeline" / f"rank-{rank}.jsonl" for rank in range(2)]
    while not all(path.exists() and b'"step":3' in path.read_bytes() for path in timelines):
        assert launcher.poll() is None, launcher.communicate()
        time.sleep(0.05)
    yield command
    launcher.terminate()
    launcher.communicate()


def watch(command: Command, columns: int, key: bytes) -> tuple[str, int, float]:
    """Run it in a terminal, press a key after two seconds. Return what was shown, the status, seconds until the end."""
    master, slave = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "LINES": "30", "TERM": "xterm"}
    words = ["-m", "unisono.cli.main", "top", "out"]
    shown = subprocess.Popen(
        [os.sys.executable, *words],  # type: ignore[attr-defined]
        cwd=command.folder,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment,
        start_new_session=True,
        preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
    )
    os.close(slave)
    text = b""
    while text.count(b"running") < 2:
        text += os.read(master, 65536)
    os.write(master, key)
    pressed = time.monotonic()
    while shown.poll() is None and time.monotonic() < pressed + 10:
        try:
            text += os.read(master, 65536)
        except OSError:
            break
    status = shown.wait(5)
    os.close(master)
    return text.decode(errors="replace"), status, time.monotonic() - pressed


@pytest.mark.parametrize("key", [b"q", b"\x03"], ids=["q", "Ctrl-C"])
def test_a_key_ends_it(running: Command, key: bytes) -> None:
    text, status, seconds = watch(running, 60, key)
    assert status == 0
    assert seconds < 5
    assert "Traceback" not in text
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    lines = [line.rstrip() for line in plain.replace("\r", "\n").split("\n")]
    assert max(map(len, lines)) <= 60
    assert any(line.startswith("rank  step  steps/s  wait") for line in lines)
    assert {"0", "1"} <= {line.split()[0] for line in lines if line.split()[1:2] and line.split()[0].isdigit()}


def test_a_pipe_gets_the_rows_once(running: Command) -> None:
    with (running.folder / "out" / "timeline" / "rank-1.jsonl").open("ab") as file:
        file.write(b'{"step":')  # damaged, as after a crash
    ended = running.run("top", "out")
    assert ended.status == 0
    head, names, *rows = ended.out.splitlines()
    assert re.fullmatch(r"out: running, step \d+ of 1000, [\d.]+ samples/s", head)
    assert names.split()[:4] == ["rank", "step", "steps/s", "wait"]
    assert [row.split()[0] for row in rows] == ["0", "1"]
    assert "\x1b" not in ended.out


def test_a_folder_that_is_no_run(command: Command) -> None:
    ended = command.run("top", "nothing")
    assert ended.status == 2
    assert "There is no run nothing." in ended.err
