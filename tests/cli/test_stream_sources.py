"""Runs whose shards are at a URL: a cache, a full disk, a source that disappears, and files that are no pictures."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.file_server import serve
from tests.house.sources import ROOT
from unisono.cli.main import main

SCRIPT = """
import io, time
from dataclasses import dataclass, field
import numpy as np, torch, unisono
from PIL import Image
from torch import nn
from unisono.data.streaming import remote_file

remote_file.WAITS = (0.05, 0.1)  # seconds

@dataclass(frozen=True, kw_only=True)
class Settings(unisono.Settings):
    steps: int | None = 12
    batch: int = 12
    virtual_ranks: int = 4
    checkpoint: unisono.CheckpointSettings = unisono.CheckpointSettings(every=2)
    url: str = field(default="", metadata={"changes_bits": False})
    cache: str = field(default="", metadata={"changes_bits": False})
    limit: str = field(default="1GB", metadata={"changes_bits": False})
    pause: float = field(default=0.0, metadata={"changes_bits": False})

def picture(sample):
    with Image.open(io.BytesIO(sample["jpg"])) as picture:
        return torch.from_numpy(np.array(picture)).float() / 255 + 0.1 * torch.rand(8, 8, 3), sample["cls"]

def main(run):
    settings = run.settings
    cache = unisono.ShardCache(settings.cache, settings.limit) if settings.cache else None
    train_set = unisono.Stream.indexed(settings.url, cache=cache, window=16, map=picture)
    model = run.place(lambda: nn.Linear(192, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(train_set):
        for x, y in step:
            time.sleep(settings.pause)
            step.backward(nn.functional.cross_entropy(model(x.flatten(1)), y, reduction="sum"), weight=len(y))
        step.update(optimizer)

if __name__ == "__main__":
    unisono.main(main, Settings)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a script, pictures in three classes, and their shards."""
    for number in range(60):
        path = tmp_path / "pictures" / ("cat", "dog", "eel")[number % 3] / f"{number:02d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (4 * number, 80 * (number % 3), 99)).save(path)
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    assert main(["shards", "pictures", "shards", "--shard-size", "14kB"]) == 0
    return tmp_path


def started(
    folder: Path, name: str, url: str, *more: str, ranks: int = 1, before: tuple[str, ...] = ()
) -> subprocess.Popen[str]:
    line = [*before, sys.executable, "-m", "unisono", "run", "script.py", "--ranks", str(ranks)]
    line += ["--run-dir", f"runs/{name}", "--set", f"url={url}", *more]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    return subprocess.Popen(line, cwd=folder, text=True, env=environment, stdout=pipe, stderr=subprocess.STDOUT)


def fingerprint(folder: Path, name: str, url: str, *more: str, ranks: int = 1, before: tuple[str, ...] = ()) -> str:
    process = started(folder, name, url, *more, ranks=ranks, before=before)
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said
    return str(json.loads((folder / "runs" / name / "result.json").read_text())["weights_sha256"])


def failure(folder: Path, name: str, url: str, *more: str, ranks: int = 1) -> str:
    process = started(folder, name, url, *more, ranks=ranks)
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 1, said
    return said


def logs(folder: Path, name: str) -> str:
    return "".join(path.read_text() for path in (folder / "runs" / name / "log").iterdir())


MOUNTED = 'mkdir disk && mount -n -t tmpfs -o size=20k tmpfs disk && exec "$@"'


@pytest.mark.ci
def test_shards_at_a_url_and_in_a_cache_have_the_bits_of_local_ones(folder: Path) -> None:
    local = fingerprint(folder, "local", "shards")
    workers = ("--set", "loader.workers=1")
    with serve(folder / "shards", folder / "seen") as server:
        assert fingerprint(folder, "url", server.url, *workers, ranks=2) == local
        cache = ("--set", "cache=cache")
        assert fingerprint(folder, "cache", server.url, *cache, *workers, ranks=3) == local
        before = server.downloads("shard-00000.tar")
        assert fingerprint(folder, "again", server.url, *cache) == local
        assert server.downloads("shard-00000.tar") == before


@pytest.mark.ci
def test_a_small_cache_and_a_full_disk_change_no_bits(folder: Path) -> None:
    """The cache is too small for two shards, and then the disk under it is full."""
    local = fingerprint(folder, "local", "shards")
    with serve(folder / "shards", folder / "seen") as server:
        small = ("--set", "cache=small", "--set", "limit=20kB")
        assert fingerprint(folder, "small", server.url, *small, ranks=2) == local
        assert "all shards in it are in use. It is read from its source" in logs(folder, "small")
        assert sum(path.stat().st_size for path in (folder / "small").glob("*.shard")) <= 20_000
        if shutil.which("unshare") is None or os.geteuid():
            return
        words = ("unshare", "-m", "sh", "-c", MOUNTED, "sh")
        full = ("--set", "cache=disk")
        assert fingerprint(folder, "full", server.url, *full, before=words) == local
        assert "No space left on device" in logs(folder, "full")


@pytest.mark.ci
def test_a_source_that_disappears_and_a_resume_from_another_one(folder: Path) -> None:
    whole = fingerprint(folder, "whole", "shards")
    skip = ("--set", "pause=0.02", "--set", "loader.on_error=skip")
    with serve(folder / "shards", folder / "seen") as server:
        process = started(folder, "mine", server.url, *skip, ranks=2)
        while not [*(folder / "runs" / "mine").glob("checkpoints/step-*")]:
            assert process.poll() is None
        server.kill()
        said, _ = process.communicate(timeout=240)
    assert process.returncode == 1, said
    assert f"{server.url}/shard-" in said
    assert "cannot be read any more." in said
    assert "check the network and the source, then continue the run with --resume." in said
    with serve(folder / "shards", folder / "seen2") as server:
        assert fingerprint(folder, "mine", server.url, "--resume", "--set", "loader.on_error=skip", ranks=3) == whole


@pytest.mark.slow
def test_what_cannot_be_trained_on_is_named(folder: Path) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "JPEG")
    (folder / "pictures" / "dog" / "none.jpg").write_bytes(buffer.getvalue()[:40] + b"no picture" * 20 + b"\xff\xd9")
    assert main(["shards", "pictures", "odd", "--shard-size", "14kB"]) == 0  # its first and last bytes are those of one
    said = failure(folder, "odd", "odd")
    assert "(dog/none) of odd/shard-0000" in said
    assert fingerprint(folder, "skipped", "odd", "--set", "loader.on_error=skip", ranks=2)
    (folder / "shards" / "shard-00001.tar").unlink()
    said = failure(folder, "missing", "shards", ranks=2)
    assert "Cannot open the shard shards/shard-00001.tar." in said
    assert "FileNotFoundError" in said
    (folder / "odd" / "shard-00001.tar").write_bytes((folder / "odd" / "shard-00001.tar").read_bytes()[:3000])
    assert "It has 3,000 bytes, and" in failure(folder, "cut", "odd", "--set", "loader.on_error=skip")
    (folder / "odd" / "index.json").write_text('{"format": 2, "shards": [')
    assert "The index odd/index.json is broken." in failure(folder, "index", "odd")
