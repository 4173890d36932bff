"""A worker at its own pace is killed: how soon the others' gradients are used again.

    python -m benchmarks.deaths                     one server, three workers, ten runs

Of each run, from the last update before the kill on: the median time from one update to the next before it, the time to
the next update, and the longest time without one within a second.
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
ASKED = ["batch=256", "steps=600", "exchange=server", "server.staleness=none"]


class Death(NamedTuple):
    """Seconds."""

    between: float
    after: float
    longest: float


def died(workers: int, at: int) -> Death:
    """A run in which the last worker is killed after `at` updates."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        words = ["run", "train.py", "--ranks", str(workers + 1), "--run-dir", "out"]
        command = [sys.executable, "-m", "unisono.cli.main", *words, *(w for each in ASKED for w in ("--set", each))]
        environment = inherited({"PYTHONPATH": str(ROOT)})
        running = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
        assert running.stdout is not None
        times: list[float] = []
        killed = 0.0
        for said in running.stdout:
            told: Any = json.loads(said) if said[:1].isdigit() and "." in said and " " not in said.strip() else None
            times += [told] if isinstance(told, float) else []
            if len(times) == at and not killed:
                os.kill(int((folder / "out" / f"pid-{workers}").read_text()), signal.SIGKILL)
                killed = times[-1]
        if running.wait():
            raise SystemExit(f"{' '.join(words)} ended with status {running.returncode}")
        after = [when for when in times if killed <= when < killed + 1.0]
        before = [b - a for a, b in pairwise(times[: at - 1])]
        return Death(median(before), after[1] - killed, max(b - a for a, b in pairwise(after)))


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--runs", type=int, default=10)
    flags.add_argument("--workers", type=int, default=3)
    asked = flags.parse_args()
    deaths = [died(asked.workers, 100) for _ in range(asked.runs)]
    for name, values in zip(Death._fields, zip(*deaths, strict=True), strict=True):
        print(f"{name:8}  median {1000 * median(values):6.1f} ms, most {1000 * max(values):6.1f} ms")
    print(line())


if __name__ == "__main__":
    main()
