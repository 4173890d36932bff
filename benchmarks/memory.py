"""Memory that training takes beside the weights, in copies of the gradient: by hand, DistributedDataParallel, ours.

    python -m benchmarks.memory            about a minute
    python -m benchmarks.memory --quick    a smoke test

A model that is nothing but weights (24 square linear layers), plain SGD, and two samples a virtual rank, so that
neither activations nor optimizer state stand beside the gradients. Every row has processes of its own; the figure is
how far the resident memory of one of them rises during the steps (Linux's VmHWM) above what it was with the model
alone, over the size of the gradient. What processes share is counted once: each has its part (PSS) of the memory that
several have open. The loop by hand holds one copy; so does DistributedDataParallel, whose buckets are the gradients.
The exact exchange holds a copy for each of the r maximal subtrees of a process's span and what the computing of a
larger subtree needs beside it (plan/reduction_tree.py); "messages", as between hosts, also what arrives of two buckets.

glibc gives large blocks that were freed back to the system only below a limit that grows by itself; what it keeps is
half a copy here, and another half in every run. The limit is set (MALLOC_MMAP_THRESHOLD_), for all rows alike.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from benchmarks.machine import parser, show
from unisono.config import Settings
from unisono.distributed.init import join_process_group as join
from unisono.environment import World
from unisono.plan.assignment import assign_evenly
from unisono.plan.reduction_tree import copies, subtrees
from unisono.testing import build_run, run_ranks

STEPS = 4
ROWS = (
    ("by hand", 1, 1),
    ("ours", 1, 1),
    ("ours", 1, 8),
    ("DDP", 2, 2),
    ("ours", 2, 2),
    ("messages", 2, 2),
    ("ours", 2, 8),
    ("messages", 2, 8),
    ("ours", 3, 8),
)
"""Who, on how many processes, with how many virtual ranks."""


def network(width: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(24)))


def kilobytes(name: str) -> int:
    """VmRSS or VmHWM of this process."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))


def counted_twice() -> int:
    """Kilobytes of shared memory that others have open as well, beyond this process's part of them."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
    part = int(next(line.split()[1] for line in lines if line.startswith("Pss_Shmem:")))
    return kilobytes("RssShmem") - part


def begin() -> int:
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak begins anew
    return kilobytes("VmRSS")


def rise(world: World, who: str, virtual_ranks: int, width: int, folder: str) -> float:
    """Copies of the gradient that this process's memory rose by."""
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(2 * virtual_ranks * STEPS, width))
    with join(world) as group:
        placed = network(width)
        before = begin()
        twice = 0
        if who in ("ours", "messages"):
            group = group if who == "ours" else replace(group, neighbors={})
            settings = Settings(steps=STEPS, batch=2 * virtual_ranks, virtual_ranks=virtual_ranks)
            run = build_run(settings, world, group, Path(folder))
            model = run.place(placed)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
            run.track(model=model, optimizer=optimizer)
            begin()
            for step in run.steps(data):
                for (x,) in step:
                    step.backward(F.mse_loss(model(x), x, reduction="sum"), weight=len(x))
                step.update(optimizer)
                peak = kilobytes("VmHWM")
                group.barrier()  # all have what they have
                twice = counted_twice()
                group.barrier()
                if step.number == STEPS - 2:  # after the last one it is saved
                    run.stop()
        else:
            model = placed if who == "by hand" else DistributedDataParallel(placed, gradient_as_bucket_view=True)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
            begin()
            for number in range(STEPS - 1):
                (x,) = data[2 * number : 2 * number + 2]
                F.mse_loss(model(x), x, reduction="sum").backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            peak = kilobytes("VmHWM")
        size = sum(p.numel() * p.element_size() for p in model.parameters()) / 1024
        del model  # DistributedDataParallel's, before its group
    return (peak - twice - before) / size


def measure(who: str, size: int, virtual_ranks: int, width: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(rise, size, who, virtual_ranks, width, folder)
    spans = assign_evenly(virtual_ranks, size)
    return {
        "who": who,
        "processes": size,
        "virtual_ranks": virtual_ranks,
        "copies": max(found),
        "subtrees": max(len(subtrees(virtual_ranks, *span)) for span in spans),
        "computing": max(copies(virtual_ranks, *span) for span in spans),
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'':10} processes  virtual ranks  copies of the gradient  r + 2"]
    for row in rows:
        promised = f"{row['subtrees'] + 2:5}" if row["who"] in ("ours", "messages") else ""
        who = f"{row['who']:10} {row['processes']:9}  {row['virtual_ranks']:13}"
        lines.append(f"{who}  {row['copies']:22.2f}  {promised}".rstrip())
    return "\n".join(lines)


def main() -> None:
    flags = parser(__doc__)
    asked = flags.parse_args()
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**20))  # read when a process starts
    rows = [measure(*row, 128 if asked.quick else 2048) for row in ROWS]
    show("memory", {"rows": rows}, lambda: table(rows), as_json=asked.json)


if __name__ == "__main__":
    main()
