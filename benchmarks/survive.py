"""Kill one of four processes, and measure the time to the survivors' next step and to the first step of four again.

    python -m benchmarks.survive            ten kills in one run, at random times: two minutes
    python -m benchmarks.survive --quick    two kills
    python -m benchmarks.survive --shard 2  two replicas in two shards each: the other replica survives

The first time is from the kill to the end of the first step of the survivors, on the slowest of them. The second one
is to the end of the first step of four processes. Nearly all of it is the new process's start (Python, torch, script).
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
from pathlib import Path
from typing import NamedTuple

from benchmarks.machine import parser, show, spread
from unisono.environment import inherited

ROOT = Path(__file__).resolve().parents[1]
RANKS = 4
TIMEOUT_SECONDS = 300.0
"""Longer than any step on a busy machine, unless it hangs."""
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
    log = open(run.dir / f"steps-{os.getpid()}.jsonl", "w", buffering=1)
    for step in run.steps(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))):
        step.run(model, lambda output, x, y: ((output - y).pow(2).sum(), len(x)))
        step.update(optimizer)
        log.write(json.dumps([time.monotonic(), step.number, run.size]) + "\\n")
        if (run.dir / "stop").exists():
            run.stop()

if __name__ == "__main__":
    unisono.main(main)
"""


class Kill(NamedTuple):
    """Seconds after a kill."""

    finished: float  # first step of the survivors
    joined: float  # first step of all processes again


class Steps:
    """Reads the logs of a run's processes, each line once, to use little time of the cores of the run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ends: dict[int, int] = {}  # bytes read
        self._last: dict[tuple[int, int], list[float]] = {}  # end times of steps, by process and group size

    def read(self) -> None:
        for path in self.folder.glob("steps-*.jsonl"):
            pid = int(path.stem.removeprefix("steps-"))
            with path.open("rb") as file:
                file.seek(self._ends.setdefault(pid, 0))
                lines = file.read().rpartition(b"\n")[0]
            self._ends[pid] += len(lines) + bool(lines)
            for line in lines.splitlines():
                at, _, size = json.loads(line)
                self._last.setdefault((pid, size), []).append(at)

    @property
    def alive(self) -> list[int]:
        """Processes that have finished a step and are alive."""
        return [pid for pid in self._ends if self._ends[pid] and alive(pid)]

    def first(self, since: float, size: int) -> float:
        """Return the seconds after `since` until `size` processes have finished a step together."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            self.read()
            found = [next((at for at in self._last.get((pid, size), []) if at > since), None) for pid in self.alive]
            ends = [at for at in found if at is not None]
            if len(ends) == size:
                self._last = {}
                return max(ends) - since
            time.sleep(0.02)
        raise TimeoutError(f"no step of {size} processes within {TIMEOUT_SECONDS:g} s; alive: {self.alive}")


def alive(pid: int) -> bool:
    try:
        return b"unisono" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def run(kills: int, seed: int, shard: int) -> list[Kill]:
    """Kill processes of one run, whose model has `shard` shards."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        script, out = Path(folder) / "script.py", Path(folder) / "out"
        script.write_text(SCRIPT)
        command = [sys.executable, "-m", "unisono.cli.main", "run", str(script), "--run-dir", str(out)]
        command += ["--ranks", str(RANKS), "--set", "batch=256", "--set", "steps=1000000", "--set", "epochs=none"]
        command += ["--set", f"parallel.shard={shard}"]
        process = subprocess.Popen(
            command, cwd=ROOT, env=inherited({"PYTHONPATH": str(ROOT)}), stdout=subprocess.DEVNULL
        )
        try:
            measured = []
            while not list(out.glob("steps-*.jsonl")):
                assert process.poll() is None, "the run failed to start"
                time.sleep(0.1)
            steps = Steps(out)
            steps.first(0.0, RANKS)
            for _ in range(kills):
                time.sleep(chance.uniform(0.5, 1.5))
                steps.read()
                victim, at = chance.choice(steps.alive), time.monotonic()
                os.kill(victim, signal.SIGKILL)
                measured.append(Kill(steps.first(at, RANKS - shard), steps.first(at, RANKS)))
            (out / "stop").touch()
            process.wait(TIMEOUT_SECONDS)
            return measured
        finally:
            process.kill()
            process.wait()


def format_seconds(values: list[float]) -> str:
    """Format median, quartiles and maximum."""
    return f"{spread(values):.3f} s, longest {max(values):.3f} s"


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--kills", type=int, default=10)
    flags.add_argument("--seed", type=int, default=1)
    flags.add_argument("--shard", type=int, default=1)
    args = flags.parse_args()
    found = run(2 if args.quick else args.kills, args.seed, args.shard)
    show("survive", {"kills": [kill._asdict() for kill in found]}, lambda: table(found), as_json=args.json)


def table(found: list[Kill]) -> str:
    return "\n".join(
        [
            f"first step of the survivors     {format_seconds([kill.finished for kill in found])}",
            f"first step of {RANKS} processes again  {format_seconds([kill.joined for kill in found])}",
        ]
    )


if __name__ == "__main__":
    main()
