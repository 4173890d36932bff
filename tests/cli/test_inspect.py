"""`unisono report` and `unisono watch` as commands: what they print, how they end, and what they refuse."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from benchmarks.report_size import write_run
from tests.cli.command import PATIENCE_SECONDS, ROOT
from unisono.cli.main import main
from unisono.environment import inherited


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_run(Path("runs/mine"), ranks=3, steps=100)
    return Path("runs/mine")


def test_report_writes_a_page_and_prints_its_path(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run_dir)]) == 0
    assert main(["report", str(run_dir), "--out", "other.html"]) == 0
    assert main(["report", str(run_dir), str(run_dir)]) == 0
    assert main(["report", str(run_dir), "--json"]) == 0
    *paths, numbers = capsys.readouterr().out.splitlines()
    assert paths == ["runs/mine/report.html", "other.html", "report.html"]
    assert all(Path(path).read_text().startswith("<!doctype html>") for path in paths)
    assert json.loads(numbers)["total"] == 100


@pytest.mark.parametrize(
    ("words", "first", "last"),
    [
        (["report"], "No run is named.", "unisono report runs/mine"),
        (["report", "runs"], "runs is not a run directory.", "unisono report runs/mine"),
        (["report", "nothing"], "There is no run nothing.", "ls runs"),
        (
            ["report", "runs/mine", "--out", "no/x.html"],
            "Cannot write no/x.html.",
            "unisono report runs/mine --out FILE",
        ),
        (["top", "runs"], "runs is not a run directory.", "unisono top runs/mine"),
        (["watch", "nothing"], "There is no run nothing.", "ls runs"),
        (["watch", "empty"], "empty is not a run directory.", "ls runs"),
        (["watch", "runs", "--port", "99999"], "--port 99999 is out of range.", "unisono watch runs"),
        (
            ["watch", "runs", "--address", "192.0.2.1"],
            "Cannot listen at 192.0.2.1, port 0.",
            "unisono watch runs (on the loopback interface)",
        ),
    ],
)
def test_a_wrong_request_has_one_clear_message(
    run_dir: Path, capsys: pytest.CaptureFixture[str], words: list[str], first: str, last: str
) -> None:
    Path("empty").mkdir()
    assert main(words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert (lines[0], lines[-1].strip()) == (first, f"Next: {last}")


def test_a_port_in_use_is_named(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["watch", "runs", "--port", str(port)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"Cannot listen at 127.0.0.1, port {port}.\n  Address already in use.")


def test_watch_serves_until_ctrl_c(run_dir: Path) -> None:
    """In a session of ssh, it prints the command of a tunnel."""
    environment = inherited({"PYTHONPATH": str(ROOT), "SSH_CONNECTION": "198.51.100.1 5 192.0.2.7 22"})
    words = [sys.executable, "-m", "unisono.cli.main", "watch", "runs/mine"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as watch:
        assert watch.stdout is not None
        address = watch.stdout.readline().split(" at ")[1].strip()
        assert re.search(r"ssh -N -L (\d+):127.0.0.1:\1 \S+@192.0.2.7", watch.stdout.readline())
        with urllib.request.urlopen(address, timeout=PATIENCE_SECONDS) as page:
            assert b"<title>mine</title>" in page.read()
        with pytest.raises(urllib.error.HTTPError, match="401") as refused:
            urllib.request.urlopen(address.partition("?")[0], timeout=PATIENCE_SECONDS)
        refused.value.close()
        watch.send_signal(signal.SIGINT)
        out, error = watch.communicate(timeout=PATIENCE_SECONDS)
    assert (watch.returncode, out.strip(), error) == (0, "", "Refusal, 127.0.0.1: no valid token.\n")
