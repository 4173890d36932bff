"""One arm in new processes: when its first step is done, and the most memory that a process takes.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.race.alone 'by hand' CNN

What it imports before its own library is torch, nothing more. The first process prints `alone {...}`: `first` is the
time of day at which every process has done its first step, `peak` the largest resident memory of any while it trained
(ours saves a checkpoint after that, which others do not), in MiB.
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


def course_of(name: str, rank: int, folder: Path) -> Course:
    torch.manual_seed(1)
    task = TASKS[name]
    data = task.data(STEPS * task.batch)
    micro = task.batch // SIZE
    return Course(task.build(), data, loss_of, rank=rank, size=SIZE, micro=micro, accumulate=1, folder=folder)


def peak_mib() -> float:
    """The most memory that this process has had."""
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line.split()[1] for line in status if line.startswith("VmHWM:"))) / 1024


def tell(first: float, peak: float) -> None:
    """Say what was seen, when every process has come here."""
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
        laps = ARMS[arm](course_of(task, int(os.environ["RANK"]), Path(folder)))
        next(laps)
        first = time.time()
        for _ in range(STEPS - 1):
            next(laps)
        tell(first, peak_mib())
    os._exit(0)  # the loops that others own are still in the middle


if __name__ == "__main__":
    main()
