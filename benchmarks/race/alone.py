"""One arm in new processes: when its first step is done, and the most memory that a process takes.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.race.alone 'by hand' CNN

What it imports before its own library is torch, nothing more. The first process prints `alone {...}`: `first` is the
time of day at which every process has done its first step, `peak` the largest resident memory of any, in MiB.
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

from benchmarks.race.arms import ARMS, Course
from benchmarks.tasks import TASKS, loss_of

SIZE = 2
STEPS = 4


def course_of(name: str, folder: Path) -> Course:
    torch.manual_seed(1)
    task = TASKS[name]
    data = task.data(STEPS * task.batch)
    return Course(task.build(), data, loss_of, size=SIZE, micro=task.batch // SIZE, accumulate=1, folder=folder)


def tell(first: float) -> None:
    """Say what was seen, when every process has come here."""
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    peak = int(next(line.split()[1] for line in status if line.startswith("VmHWM:"))) / 1024
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
        laps = ARMS[arm](course_of(task, Path(folder)))
        next(laps)
        first = time.time()
        for _ in range(STEPS - 1):
            next(laps)
        tell(first)
    os._exit(0)  # the loops that others own are still in the middle


if __name__ == "__main__":
    main()
