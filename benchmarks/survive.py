"""A process of four is killed with SIGKILL: how soon the others have finished a step without it, and how soon another
one has taken its place.

    python -m benchmarks.survive                     ten kills in one run, at random moments

First, from the kill to the end of the first step that the three finish, on the slowest of them; then to that of the
first step of four again, nearly all of which is the new process's own start (Python, torch, the script).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

from benchmarks.machine import line
from unisono.env import inherited

ROOT = Path(__file__).resolve().parents[1]
RANKS = 4
SCRIPT = """
import json, os, time
import torch
import unisono

def main(run):
    build = lambda: torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1))
    model = run.place(build)
    optimizer = torch.optim.AdamW(model.parameters())
    run.track(model=model, optimizer=optimizer)
    x = torch.randn(4096, 256, generator=torch.Generator().manual_seed(0))
    told = open(run.dir / f"steps-{os.getpid()}.jsonl", "w", buffering=1)
    for step in run.steps(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))):
        step.run(model, lambda output, x, y: ((output - y).pow(2).sum(), len(x)))
        step.update(optimizer)
        told.write(json.dumps([time.monotonic(), step.number, run.size]) + "\\n")
        if (run.dir / "enough").exists():
            run.stop()

if __name__ == "__main__":
    unisono.main(main)
"""


class Kill(NamedTuple):
    """Seconds from it on."""

    finished: float
    joined: float


def told(folder: Path) -> dict[int, list[tuple[float, int, int]]]:
    """What each process has told so far: when it had finished which step, in a group of how many."""
    found = {}
    for path in folder.glob("steps-*.jsonl"):
        lines = path.read_text().split("\n")[:-1]
        found[int(path.stem.removeprefix("steps-"))] = [tuple(json.loads(each)) for each in lines]
    return found


def alive(pid: int) -> bool:
    try:
        return b"unisono" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def first(folder: Path, since: float, size: int, *, patience: float = 60.0) -> float:
    """When all of `size` processes have finished a step together after that moment."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        found = [
            next((at for at, _, of in steps if at > since and of == size), None)
            for pid, steps in told(folder).items()
            if alive(pid)
        ]
        ends = [at for at in found if at is not None]
        if len(ends) == size:
            return max(ends) - since
        time.sleep(0.02)
    raise TimeoutError(f"no step of {size} processes within {patience:g} s")


def run(kills: int, seed: int) -> list[Kill]:
    """So many kills in one run."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        script, out = Path(folder) / "script.py", Path(folder) / "out"
        script.write_text(SCRIPT)
        command = [sys.executable, "-m", "unisono.cli.main", "run", str(script), "--run-dir", str(out)]
        command += ["--ranks", str(RANKS), "--set", "batch=256", "--set", "steps=1000000", "--set", "epochs=none"]
        running = subprocess.Popen(
            command, cwd=ROOT, env=inherited({"PYTHONPATH": str(ROOT)}), stdout=subprocess.DEVNULL
        )
        try:
            found = []
            while not out.exists() or not told(out):
                assert running.poll() is None, "it did not begin"
                time.sleep(0.1)
            first(out, 0.0, RANKS)
            for _ in range(kills):
                time.sleep(chance.uniform(0.5, 1.5))
                victim = chance.choice([pid for pid in told(out) if alive(pid)])
                at = time.monotonic()
                os.kill(victim, signal.SIGKILL)
                found.append(Kill(first(out, at, RANKS - 1), first(out, at, RANKS)))
            (out / "enough").touch()
            running.wait(60)
            return found
        finally:
            running.kill()
            running.wait()


def shown(values: list[float]) -> str:
    low, _, high = quantiles(values, n=4) if len(values) > 1 else [*values, 0.0, *values]
    return f"median {median(values):.3f} s ({low:.3f} to {high:.3f}), longest {max(values):.3f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(line())
    found = run(options.kills, options.seed)
    print(f"a step of the others   {shown([kill.finished for kill in found])}")
    print(f"{RANKS} processes again    {shown([kill.joined for kill in found])}")


if __name__ == "__main__":
    main()
