"""Measure one arm in new processes: time to the first step, and peak memory.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.race.alone 'by hand' CNN

It imports only torch before the arm's library. Rank 0 prints `alone {...}`: `first` is the time of day after the first
step of all processes, and `peak` is the largest resident memory of a process in MiB. The checkpoint that ours saves at
the end does not count, because other arms save none.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.race.arms import ARMS, Setup
from benchmarks.tasks import TASKS, loss_of

SIZE = 2
STEPS = 4


def make_setup(name: str, rank: int, folder: Path) -> Setup:
    torch.manual_seed(1)
    task = TASKS[name]
    data = task.data(STEPS * task.batch)
    micro = task.batch // SIZE
    return Setup(task.build(), data, loss_of, rank=rank, size=SIZE, micro=micro, accumulate=1, folder=folder)


def peak_mib() -> float:
    """Return the peak resident memory of this process."""
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line.split()[1] for line in status if line.startswith("VmHWM:"))) / 1024


def report(first: float, peak: float) -> None:
    """Print the maxima over all processes."""
    seen = torch.tensor([first, peak], dtype=torch.float64)
    dist.all_reduce(seen, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print("\nalone", json.dumps({"first": float(seen[0]), "peak": float(seen[1])}), flush=True)
    dist.barrier()


def main() -> None:
    torch.set_num_threads(1)
    arm, task = sys.argv[1:]
    if arm == "by hand":
        dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder:
        steps = ARMS[arm](make_setup(task, int(os.environ["RANK"]), Path(folder)))
        next(steps)
        first = time.time()
        for _ in range(STEPS - 1):
            next(steps)
        report(first, peak_mib())
    os._exit(0)  # do not wait for the loops of other libraries, which have not ended


if __name__ == "__main__":
    main()
