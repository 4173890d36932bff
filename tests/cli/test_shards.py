"""`unisono shards` as a command: what it prints, a kill and a full disk while it writes, and wrong requests."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.refused_requests import RequestProblems
from tests.house.sources import ROOT
from tests.unit.test_shard_writer import classes, content
from unisono.cli.main import main
from unisono.data.streaming.stream import Stream


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    classes(tmp_path / "pictures")
    return tmp_path


def test_a_folder_becomes_shards(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shards", "pictures", "out", "--shard-size", "10kB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "30 samples in pictures (classes)"
    assert lines[1].startswith("10 shards with 30 samples, ")
    assert lines[2] == 'Next: unisono.Stream.indexed("out")'
    assert len(Stream.indexed("out")) == 30
    assert main(["shards", "pictures", "out", "--shard-size", "10kB", "--json"]) == 0
    said = capsys.readouterr()
    assert "10 shards were there already." in said.err
    summary = json.loads(said.out)
    assert {"shards": 10, "samples": 30, "classes": 3, "resumed": 10, "skipped": 0}.items() <= summary.items()


def test_wrong_requests(folder: Path, request_problems: RequestProblems) -> None:
    (problem,) = request_problems("shards", "picture", "out")
    assert problem.error == "There is no picture."
    assert problem.remedy == "unisono shards pictures out"
    (problem,) = request_problems("shards", "pictures", "out", "--shard-size", "big")
    assert problem.remedy == "unisono shards pictures out --shard-size 1GB"
    (problem,) = request_problems("shards", "pictures", "pictures/out")
    assert problem.error == "pictures/out is inside pictures."
    (problem,) = request_problems("shards", "pictures")
    assert "pictures" in problem.remedy


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "unisono", "shards", "pictures", "out", "--shard-size", "4kB", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    return subprocess.Popen(line, cwd=folder, text=True, env=environment, stdout=pipe, stderr=pipe)


@pytest.mark.ci
def test_kills_at_random_moments(tmp_path: Path) -> None:
    """Each command is killed while it writes; the last one gives the bytes of a command that ran through."""
    classes(tmp_path / "pictures", 900)
    whole = start(tmp_path)
    assert whole.communicate(timeout=60)[1] == ""
    (tmp_path / "out").rename(tmp_path / "whole")
    killed = 0
    for count in range(1, 300, 60):
        process = start(tmp_path, "--workers", "1")
        while process.poll() is None and len([*(tmp_path / "out").glob("shard-*.tar")]) < count:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        killed += process.returncode == -signal.SIGKILL
        assert not (tmp_path / "out" / "index.json").exists()
    assert killed == 5
    last = start(tmp_path)
    said, problem = last.communicate(timeout=60)
    assert problem == ""
    assert "shards were there already." in said
    assert content(tmp_path / "out") == content(tmp_path / "whole")


SMALL_DISK = """
import os, subprocess, sys
os.makedirs("out", exist_ok=True)
if subprocess.run(["mount", "-n", "-t", "tmpfs", "-o", "size=40k", "tmpfs", "out"]).returncode:
    sys.exit(77)
from unisono.cli.main import main
first = main(["shards", "pictures", "out", "--shard-size", "8kB"])
subprocess.run(["mount", "-n", "-o", "remount,size=10m", "out"], check=True)
print("again", flush=True)
second = main(["shards", "pictures", "out", "--shard-size", "8kB"])
print(first, second)
"""


def test_a_disk_that_fills_while_shards_are_written(folder: Path) -> None:
    if shutil.which("unshare") is None or os.geteuid():
        pytest.skip("needs root to mount a small disk")
    words = ["unshare", "-m", sys.executable, "-c", SMALL_DISK]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    if done.returncode in (1, 77):
        pytest.skip(f"cannot mount a small disk: {done.stderr}")
    assert "Cannot write shards into out.\n  No space left on device." in done.stderr
    assert "The same command writes the shards that are missing." in done.stderr
    assert done.stdout.splitlines()[-1] == "1 0", done.stdout
    assert "there already." in done.stdout.partition("again")[2]  # one shard at least
