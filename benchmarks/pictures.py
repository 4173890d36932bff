"""The imagenet recipe on many small JPEG files: start, memory of each process, pictures per second, and the bits.

    python -m benchmarks.pictures FOLDER                      draws 200,000 files of 100 classes there, unless it exists
    python -m benchmarks.pictures FOLDER --tars FOLDER        and tar files of them

Each run trains for a while on another number of processes and loader workers. While it runs, the memory of each process
is read twice a second: resident (RSS), and the part that it shares with no other (USS). A run that kept what it reads
would grow by the size of the pictures. The first run scans the folder, the others find its index in the cache.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil  # type: ignore[import-untyped]

from unisono.recipes.vision.drawn_shapes import write_classes

BATCH = 128
SETS = ("size=48", f"batch={BATCH}", "epochs=none", "model.width=4", "evaluate_every=0")
SMALL = ("size=16", "model.width=2")
"""For --all, so that reading the pictures takes most of the time."""
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


def measure(data: list[str], ranks: int, workers: int, steps: int, folder: Path) -> dict[str, Any]:
    """Run the recipe, and return what was measured."""
    run_dir = folder / f"run-{time.monotonic_ns()}"
    sets = [*SETS, *data, f"steps={steps}", f"loader.workers={workers}"]
    command = [sys.executable, "-m", "unisono.cli.main", "run", "imagenet", "--ranks", str(ranks)]
    command += ["--run-dir", str(run_dir), *(word for each in sets for word in ("--set", each))]
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    wall, began = time.time(), time.monotonic()
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        memory = watch(process, began)
    if process.returncode:
        raise SystemExit((folder / "log").read_text(encoding="utf-8"))
    result = json.loads((run_dir / "result.json").read_text(encoding="utf-8"))
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


def main() -> None:
    """Measure each placement, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pictures", type=int, default=200_000)
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--all", action="store_true", help="one run on two processes that reads every picture instead")
    parser.add_argument("--tars", type=Path, help="folder with train-*.tar and val-*.tar of the same pictures")
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
    print("ranks  workers  first step s  largest process MB: early  late  of its own  pictures/s  top-1  fingerprint")
    with tempfile.TemporaryDirectory() as name:
        steps = -(-len(sizes) // BATCH) if request.all else request.steps
        for ranks, workers in [(2, 1)] if request.all else PLACEMENTS:
            found = measure([*data, *SMALL] if request.all else data, ranks, workers, steps, Path(name))
            print(
                f"{ranks:5}  {workers:7}  {found['first_step']:12.1f}  {found['early']:25.0f}  {found['late']:4.0f}  "
                f"{found['own']:10.0f}  {found['samples_per_second']:10.0f}  {found['top1']:5.1%}  "
                f"{found['weights_sha256'][:12]}",
                flush=True,
            )


if __name__ == "__main__":
    main()
