"""Read JPEG files as a folder, with WebDataset, with MosaicML Streaming and with ours: samples a second, interleaved.

    python -m benchmarks.loaders             about eight minutes; 20,000 pictures
    python -m benchmarks.loaders --quick     a smoke test
    python -m benchmarks.loaders --samples 200000 --data FOLDER

The packages webdataset and mosaicml-streaming are optional peers: an arm whose package is missing is left out. All arms
decode with the same function, make batches of 64, and have equally many loader workers. In each round every arm reads
the same number of samples, one arm after the other, with all loaders open. Before an arm is read, the workers of the
arm before it have time to fetch ahead and stop. The figures are medians over the rounds, and ratios within a round.
The rounds are short and many, so that a machine whose speed changes affects all arms alike. After each round all
loaders are opened again: workers of one opening may be 10 % slower than those of another, for as long as they run. The
time of the processors includes that of the workers. It varies less than the throughput while other programs run.

Then a small network is trained on the shards on one and on three processes, with and without workers, and once with a
kill -9 and a resume on another number of processes. The exit status is 1 if a fingerprint differs.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch

from benchmarks.loader_arms import ARMS, first_samples, write_mds, write_pictures
from benchmarks.machine import ROOT, parser, python_path, ratio, show, spread

PACKAGES = {"webdataset": "webdataset", "mosaic": "streaming"}
PAUSE = 0.3
"""Seconds in which workers fetch the batches that they fetch ahead."""
ME = psutil.Process()
SCRIPT = ROOT / "benchmarks" / "loaders_script.py"


def prepare(data: Path, samples: int, arms: list[str]) -> None:
    """Write the pictures in every format, those that are not there yet."""
    if not (data / "folder").exists():
        write_pictures(data / "folder.draft", samples)
        (data / "folder.draft").rename(data / "folder")
    words = ["shards", str(data / "folder"), str(data / "shards"), "--shard-size", "16MB"]
    subprocess.run([sys.executable, "-m", "unisono", *words], check=True, env=environment(), stdout=sys.stderr)
    if "mosaic" in arms and not (data / "mds" / "index.json").exists():
        write_mds(data / "mds", data / "folder")


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": python_path()}


def measure(data: Path, arms: list[str], workers: int, rounds: int, samples: int) -> dict[str, dict[str, list[float]]]:
    """Return what each arm took in each round: samples a second, and microseconds of all processors for a sample."""
    torch.set_num_threads(1)
    found: dict[str, dict[str, list[float]]] = {name: {"speed": [], "cpu": []} for name in arms}
    order = random.Random(0)  # the arms draw from the global generator, and ours seeds it
    for _ in range(rounds):
        opened, processes = {}, {}
        for name in order.sample(arms, len(arms)):
            before = set(ME.children())
            opened[name] = ARMS[name](data, workers)
            first_samples(opened[name], samples // 4)
            processes[name] = [ME, *(set(ME.children()) - before)]
        for name in order.sample(arms, len(arms)):
            used = cpu_seconds(processes[name])
            ahead = first_samples(opened[name], 64 * 2 * max(workers, 1))  # what was fetched while others were read
            began = time.perf_counter()
            seen = first_samples(opened[name], samples)
            found[name]["speed"].append(seen / (time.perf_counter() - began))
            time.sleep(PAUSE if workers else 0)
            found[name]["cpu"].append((cpu_seconds(processes[name]) - used) / (ahead + seen) * 1e6)
        for arm in opened.values():
            arm.close()
    return found


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """Return the seconds that processors have computed for these processes."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def start(data: Path, run: Path, ranks: int, workers: int, *more: str) -> subprocess.Popen[bytes]:
    words = ["run", str(SCRIPT), "--ranks", str(ranks), "--run-dir", str(run), *more]
    words += ["--set", f"shards={data / 'shards'}", "--set", f"loader.workers={workers}"]
    log = open(run.with_suffix(".log"), "ab")  # noqa: SIM115  (closed with the process)
    return subprocess.Popen([sys.executable, "-m", "unisono", *words], env=environment(), stdout=log, stderr=log)


def fingerprint(run: Path, process: subprocess.Popen[bytes]) -> str:
    if process.wait():
        raise RuntimeError(run.with_suffix(".log").read_text(encoding="utf-8"))
    return str(json.loads((run / "result.json").read_text(encoding="utf-8"))["weights_sha256"])


def fingerprints(data: Path, folder: Path) -> dict[str, str]:
    """Train in several ways, and return the fingerprint of each."""
    found = {}
    for ranks, workers in ((1, 0), (1, 2), (3, 0), (3, 2)):
        run = folder / f"{ranks}-{workers}"
        found[f"{ranks} process{'es' * (ranks > 1)}, {workers} workers"] = fingerprint(
            run, start(data, run, ranks, workers)
        )
    run = folder / "killed"
    process = start(data, run, 3, 2)
    while not [*run.glob("checkpoints/step-*")] and process.poll() is None:
        time.sleep(0.01)
    kill_all(process.pid)
    process.wait()
    found["3 processes, kill -9 of all, resumed on 2"] = fingerprint(run, start(data, run, 2, 1, "--resume"))
    return found


def kill_all(pid: int) -> None:
    """Kill a process and its descendants."""
    for process in [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]:
        process.send_signal(signal.SIGKILL)


def main() -> int:
    flags = parser(__doc__)
    flags.add_argument("--samples", type=int, default=20_000, help="pictures")
    flags.add_argument("--data", type=Path, help="where they are written, and kept")
    flags.add_argument("--rounds", type=int, default=41)
    flags.add_argument("--part", type=int, default=1024, help="samples that an arm reads in a round")
    flags.add_argument("--skip", action="append", default=[], choices=["speed", "bits"])
    given = flags.parse_args()
    amount, rounds, part = (400, 2, 128) if given.quick else (given.samples, given.rounds, given.part)
    arms = [name for name in ARMS if find_spec(PACKAGES.get(name, "torch")) is not None]
    figures: dict[str, Any] = {"samples": amount, "missing": [name for name in ARMS if name not in arms]}
    with tempfile.TemporaryDirectory() as scratch:
        data = given.data or Path(scratch) / "data"
        prepare(data, amount, arms)
        if "speed" not in given.skip:
            figures["speed"] = {n: measure(data, arms, n, rounds, part) for n in (0, 2)}
        if "bits" not in given.skip:
            figures["bits"] = fingerprints(data, Path(scratch))
    show("loaders", figures, lambda: table(figures), as_json=given.json)
    return int(len(set(figures.get("bits", {}).values())) > 1)


def table(figures: dict[str, Any]) -> str:
    """Return the figures as text."""
    lines = [f"{figures['samples']} pictures; missing: {', '.join(figures['missing']) or 'nothing'}"]
    for workers, found in figures.get("speed", {}).items():
        for part, unit in (("speed", "samples a second"), ("cpu", "us of processors a sample")):
            lines += ["", f"{workers} workers        {unit:25}    ours relative to it"]
            for name, all_parts in found.items():
                values, ours = all_parts[part], found["ours"][part]
                lines.append(f"{name:12} {spread(values):8.0f}     {ratio(ours, values):.3f}")
    for way, digest in figures.get("bits", {}).items():
        lines.append(f"{digest[:16]}  {way}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
