"""The imagenet recipe on many small JPEG files: start, memory of each process, pictures per second, and the bits.

    python -m benchmarks.pictures FOLDER                      draws 200,000 files of 100 classes there, unless it exists
    python -m benchmarks.pictures FOLDER --tars FOLDER        and tar files of them
    python -m benchmarks.pictures FOLDER --shards FOLDER      and shards of them, which are written unless they exist

Each run trains for a while on another number of processes and loader workers. While it runs, the memory of each process
is read twice a second: resident (RSS), and the part that it shares with no other (USS). A run that kept what it reads
would grow by the size of the pictures. The first run scans the folder, the others find its index in the cache. The
last run is killed (kill -9 of all processes) after its first checkpoint, and resumed on another number of processes.
The exit status is 1 if a fingerprint differs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil  # type: ignore[import-untyped]

from benchmarks.loaders import kill_all
from unisono.recipes.vision.drawn_shapes import write_classes

BATCH = 128
SETS = ("size=48", f"batch={BATCH}", "epochs=none", "model.width=4", "evaluate_every=0")
SMALL = ("size=16", "model.width=2")
"""For --all and --small, so that reading the pictures takes most of the time."""
PLACEMENTS = ((1, 0), (1, 0), (1, 2), (2, 1), (3, 0))
"""Processes, and loader workers of each."""


class Memory(NamedTuple):
    """Memory of one process at one moment, in MB."""

    seconds: float
    process: int
    resident: float
    own: float


def watch(process: subprocess.Popen[bytes], began: float) -> list[Memory]:
    """Return the memory of the run's Python processes, twice a second, until it ends."""
    found = []
    while process.poll() is None:
        time.sleep(0.5)
        for child in psutil.Process(process.pid).children(recursive=True):
            try:
                memory = child.memory_full_info()
            except psutil.Error:  # it has ended
                continue
            found.append(Memory(time.monotonic() - began, child.pid, memory.rss / 1e6, memory.uss / 1e6))
    return found


def seconds_to_first_step(run_dir: Path, began: float) -> float:
    """Return the time from the command to the end of its first step."""
    for line in (run_dir / "timeline" / "rank-0.jsonl").read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        if "step" in event and "loss" in event:
            return float(event["t"]) - began
    return float("nan")


def start(run_dir: Path, ranks: int, sets: list[str], *more: str) -> subprocess.Popen[bytes]:
    """Start the recipe."""
    command = [sys.executable, "-m", "unisono.cli.main", "run", "imagenet", "--ranks", str(ranks)]
    command += ["--run-dir", str(run_dir), *more, *(word for each in [*SETS, *sets] for word in ("--set", each))]
    environment = {**os.environ, "XDG_CACHE_HOME": str(run_dir.parent / "cache")}
    with open(run_dir.parent / "log", "wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def result_of(run_dir: Path, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Return what a run has written."""
    if process.wait():
        raise SystemExit((run_dir.parent / "log").read_text(encoding="utf-8"))
    result: dict[str, Any] = json.loads((run_dir / "result.json").read_text(encoding="utf-8"))
    return result


def fingerprint_after_kill(sets: list[str], steps: int, folder: Path) -> str:
    """Kill three processes with a loader worker each after the first checkpoint, and resume on two without."""
    run_dir, sets = folder / "killed", [*sets, f"steps={steps}", f"checkpoint.every={steps // 3}"]
    process = start(run_dir, 3, [*sets, "loader.workers=1"])
    while not [*run_dir.glob("checkpoints/step-*")] and process.poll() is None:
        time.sleep(0.05)
    kill_all(process.pid)
    if process.wait() != -signal.SIGKILL:
        raise SystemExit((folder / "log").read_text(encoding="utf-8"))
    return str(result_of(run_dir, start(run_dir, 2, sets, "--resume"))["weights_sha256"])


def measure(data: list[str], ranks: int, workers: int, steps: int, folder: Path) -> dict[str, Any]:
    """Run the recipe, and return what was measured."""
    run_dir = folder / f"run-{time.monotonic_ns()}"
    wall, began = time.time(), time.monotonic()
    process = start(run_dir, ranks, [*data, f"steps={steps}", f"loader.workers={workers}"])
    memory = watch(process, began)
    result = result_of(run_dir, process)
    first = seconds_to_first_step(run_dir, wall)
    last = max(each.seconds for each in memory)
    early = [each for each in memory if first + 2 < each.seconds < first + 0.3 * (last - first)]
    late = [each for each in memory if each.seconds > first + 0.7 * (last - first)]
    return {
        "first_step": first,
        "early": max((each.resident for each in early), default=float("nan")),
        "late": max((each.resident for each in late), default=float("nan")),
        "own": max((each.own for each in late), default=float("nan")),
        **{name: result[name] for name in ("samples", "samples_per_second", "top1", "weights_sha256")},
    }


def main() -> int:
    """Measure each placement, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pictures", type=int, default=200_000)
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--all", action="store_true", help="one run on two processes that reads every picture instead")
    parser.add_argument(
        "--small", action="store_true", help="smaller model and pictures: reading takes most of the time"
    )
    parser.add_argument("--tars", type=Path, help="folder with train-*.tar and val-*.tar of the same pictures")
    parser.add_argument("--shards", type=Path, help="folder for shards of the same pictures")
    request = parser.parse_args()
    if not request.folder.exists():
        began = time.monotonic()
        write_classes(request.folder, request.pictures, request.classes, 2000, workers=os.cpu_count() or 1)
        print(f"drawn in {time.monotonic() - began:.0f} s")
    with os.scandir(request.folder / "train") as classes:
        sizes = [file.stat().st_size for each in classes for file in os.scandir(each.path)]
    print(f"{len(sizes):,} files, {sum(sizes) / 1e6:.0f} MB, {sum(sizes) / len(sizes):.0f} bytes each")
    data = [f"data={request.folder}"]
    if request.tars:
        data = [f"data={request.tars}/train-*.tar", f"valid={request.tars}/val-*.tar", f"classes={request.classes}"]
    if request.shards:
        data = [f"data={request.shards}"]
        for part in ("train", "val"):
            words = ["shards", str(request.folder / part), str(request.shards / part), "--shard-size", "32MB"]
            subprocess.run([sys.executable, "-m", "unisono.cli.main", *words], check=True)
    data += SMALL if request.all or request.small else ()
    print("ranks  workers  first step s  largest process MB: early  late  of its own  pictures/s  top-1  fingerprint")
    with tempfile.TemporaryDirectory() as name:
        steps = -(-len(sizes) // BATCH) if request.all else request.steps
        fingerprints = set[str]()
        for ranks, workers in [(2, 1)] if request.all else PLACEMENTS:
            found = measure(data, ranks, workers, steps, Path(name))
            fingerprints.add(found["weights_sha256"])
            print(
                f"{ranks:5}  {workers:7}  {found['first_step']:12.1f}  {found['early']:25.0f}  {found['late']:4.0f}  "
                f"{found['own']:10.0f}  {found['samples_per_second']:10.0f}  {found['top1']:5.1%}  "
                f"{found['weights_sha256'][:12]}",
                flush=True,
            )
        if not request.all:
            fingerprints.add(killed := fingerprint_after_kill(data, steps, Path(name)))
            print(f"3 processes, kill -9 of all, resumed on 2: {killed[:12]}")
    return int(len(fingerprints) > 1)


if __name__ == "__main__":
    sys.exit(main())
