"""Kill a worker of an asynchronous parameter server, and measure how soon the next update comes.

    python -m benchmarks.deaths                     one server, three workers, ten runs

For each run: the median time between updates before the kill; the time from the last update before the kill to the next
one; and the longest time between updates in the second after the kill.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.machine import line
from unisono.environment import inherited

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = """
import json, os, sys, time
import torch
import unisono

def main(run):
    layers = torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1)
    model = run.place(lambda: torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters())
    run.track(model=model, optimizer=optimizer)
    x = torch.randn(4096, 256, generator=torch.Generator().manual_seed(0))
    if not run.is_main:
        (run.dir / f"pid-{run.rank}").write_text(str(os.getpid()))
    for step in run.steps(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))):
        step.run(model, lambda output, x, y: ((output - y).pow(2).sum(), len(x)))
        step.update(optimizer)
        if run.is_main:
            print(json.dumps(time.time()), flush=True)

if __name__ == "__main__":
    unisono.main(main)
"""
SETTINGS = ["batch=256", "steps=600", "exchange=server", "server.staleness=none"]


class Death(NamedTuple):
    """Times of a run, in seconds."""

    between: float
    after: float
    longest: float


def kill_worker(workers: int, at: int) -> Death:
    """Run, kill the last worker after `at` updates, and return the times between updates."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        words = ["run", "train.py", "--ranks", str(workers + 1), "--run-dir", "out"]
        command = [sys.executable, "-m", "unisono.cli.main", *words, *(w for each in SETTINGS for w in ("--set", each))]
        environment = inherited({"PYTHONPATH": str(ROOT)})
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        times: list[float] = []
        killed = 0.0
        for printed in process.stdout:
            is_number = printed[:1].isdigit() and "." in printed and " " not in printed.strip()
            value: Any = json.loads(printed) if is_number else None
            times += [value] if isinstance(value, float) else []
            if len(times) == at and not killed:
                os.kill(int((folder / "out" / f"pid-{workers}").read_text()), signal.SIGKILL)
                killed = times[-1]
        if process.wait():
            raise SystemExit(f"{' '.join(words)} exited with status {process.returncode}")
        after = [when for when in times if killed <= when < killed + 1.0]
        before = [b - a for a, b in pairwise(times[: at - 1])]
        return Death(median(before), after[1] - killed, max(b - a for a, b in pairwise(after)))


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--runs", type=int, default=10)
    flags.add_argument("--workers", type=int, default=3)
    args = flags.parse_args()
    deaths = [kill_worker(args.workers, 100) for _ in range(args.runs)]
    for name, values in zip(Death._fields, zip(*deaths, strict=True), strict=True):
        print(f"{name:8}  median {1000 * median(values):6.1f} ms, maximum {1000 * max(values):6.1f} ms")
    print(line())


if __name__ == "__main__":
    main()
