"""A process of four is killed with SIGKILL: how soon the others have finished a step without it, and how soon another
one has taken its place.

    python -m benchmarks.survive            ten kills in one run, at random moments: two minutes
    python -m benchmarks.survive --quick    two
    python -m benchmarks.survive --shard 2  two models in two shards each: the other replica goes on

First, from the kill to the end of the first step that the three finish, on the slowest of them; then to that of the
first step of four again, nearly all of which is the new process's own start (Python, torch, the script).
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
PATIENCE_SECONDS = 300.0
"""Nothing takes that long, however busy the machine is, unless it hangs."""
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


class Steps:
    """What the processes of a run have told so far. Each line is read once: the run goes on beside us, on the same
    cores."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ends: dict[int, int] = {}  # bytes read
        self._last: dict[tuple[int, int], list[float]] = {}  # when steps were over, by process and group size

    def read(self) -> None:
        for path in self.folder.glob("steps-*.jsonl"):
            pid = int(path.stem.removeprefix("steps-"))
            with path.open("rb") as file:
                file.seek(self._ends.setdefault(pid, 0))
                whole = file.read().rpartition(b"\n")[0]
            self._ends[pid] += len(whole) + bool(whole)
            for line in whole.splitlines():
                at, _, size = json.loads(line)
                self._last.setdefault((pid, size), []).append(at)

    @property
    def alive(self) -> list[int]:
        """Processes that have told something and live."""
        return [pid for pid in self._ends if self._ends[pid] and alive(pid)]

    def first(self, since: float, size: int) -> float:
        """Seconds from that moment until all of `size` processes had finished a step together."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            self.read()
            found = [next((at for at in self._last.get((pid, size), []) if at > since), None) for pid in self.alive]
            ends = [at for at in found if at is not None]
            if len(ends) == size:
                self._last = {}
                return max(ends) - since
            time.sleep(0.02)
        raise TimeoutError(f"no step of {size} processes within {PATIENCE_SECONDS:g} s; alive: {self.alive}")


def alive(pid: int) -> bool:
    try:
        return b"unisono" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def run(kills: int, seed: int, shard: int) -> list[Kill]:
    """So many kills in one run of models in so many shards."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        script, out = Path(folder) / "script.py", Path(folder) / "out"
        script.write_text(SCRIPT)
        command = [sys.executable, "-m", "unisono.cli.main", "run", str(script), "--run-dir", str(out)]
        command += ["--ranks", str(RANKS), "--set", "batch=256", "--set", "steps=1000000", "--set", "epochs=none"]
        command += ["--set", f"parallel.shard={shard}"]
        running = subprocess.Popen(
            command, cwd=ROOT, env=inherited({"PYTHONPATH": str(ROOT)}), stdout=subprocess.DEVNULL
        )
        try:
            found = []
            while not list(out.glob("steps-*.jsonl")):
                assert running.poll() is None, "it did not begin"
                time.sleep(0.1)
            steps = Steps(out)
            steps.first(0.0, RANKS)
            for _ in range(kills):
                time.sleep(chance.uniform(0.5, 1.5))
                steps.read()
                victim, at = chance.choice(steps.alive), time.monotonic()
                os.kill(victim, signal.SIGKILL)
                found.append(Kill(steps.first(at, RANKS - shard), steps.first(at, RANKS)))
            (out / "enough").touch()
            running.wait(PATIENCE_SECONDS)
            return found
        finally:
            running.kill()
            running.wait()


def shown(values: list[float]) -> str:
    return f"{spread(values):.3f} s, longest {max(values):.3f} s"


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--kills", type=int, default=10)
    flags.add_argument("--seed", type=int, default=1)
    flags.add_argument("--shard", type=int, default=1)
    asked = flags.parse_args()
    found = run(2 if asked.quick else asked.kills, asked.seed, asked.shard)
    show("survive", {"kills": [kill._asdict() for kill in found]}, lambda: table(found), as_json=asked.json)


def table(found: list[Kill]) -> str:
    return "\n".join(
        [
            f"a step of the others   {shown([kill.finished for kill in found])}",
            f"{RANKS} processes again    {shown([kill.joined for kill in found])}",
        ]
    )


if __name__ == "__main__":
    main()
