"""Measure the memory of training beyond the weights, in copies of the gradient.

    python -m benchmarks.memory            about a minute
    python -m benchmarks.memory --quick    a smoke test

The model has 24 square linear layers, the optimizer is plain SGD, and each virtual rank has two samples, so activations
and optimizer state are small. Each row starts new processes. The figure is the increase of a process's peak resident
memory (Linux's VmHWM) over its memory with only the model, divided by the size of the gradient. Shared memory is
counted once, by proportional set size (PSS). The loop by hand holds one copy. So does DistributedDataParallel, whose
buckets are the gradients. The exact exchange holds a copy for each of the r maximal subtrees of a process's span, and
temporary copies while it computes a larger subtree (plan/reduction_tree.py). "messages" (the exchange without shared
memory, as between hosts) also holds the received parts of two buckets.

By default, glibc keeps freed blocks below a threshold that grows during the run: half a copy here, with much variation.
MALLOC_MMAP_THRESHOLD_ fixes the threshold for all rows.
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
"""Loop, number of processes and number of virtual ranks."""


def network(width: int) -> nn.Module:
    """Build a model whose activations are small."""
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(24)))


def kilobytes(name: str) -> int:
    """Return a field of this process's status, as VmRSS or VmHWM."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))


def others_shared_memory() -> int:
    """Return the kilobytes of shared memory that are attributed to other processes."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
    own = int(next(line.split()[1] for line in lines if line.startswith("Pss_Shmem:")))
    return kilobytes("RssShmem") - own


def reset_peak() -> int:
    """Reset VmHWM, and return the kilobytes of resident memory."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return kilobytes("VmRSS")


def measure_copies(world: World, loop: str, virtual_ranks: int, width: int, folder: str) -> float:
    """Return the increase of this process's memory, in copies of the gradient."""
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(2 * virtual_ranks * STEPS, width))
    with join(world) as group:
        net = network(width)
        before = reset_peak()
        shared = 0
        if loop in ("ours", "messages"):
            group = group if loop == "ours" else replace(group, neighbors={}, hosts=())
            settings = Settings(steps=STEPS, batch=2 * virtual_ranks, virtual_ranks=virtual_ranks)
            run = build_run(settings, world, group, Path(folder))
            model = run.place(net)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
            run.track(model=model, optimizer=optimizer)
            reset_peak()
            for step in run.steps(data):
                for (x,) in step:
                    step.backward(F.mse_loss(model(x), x, reduction="sum"), weight=len(x))
                step.update(optimizer)
                peak = kilobytes("VmHWM")
                group.barrier()  # no process frees its shared memory before the others have measured
                shared = others_shared_memory()
                group.barrier()
                if step.number == STEPS - 2:  # the last step is followed by a checkpoint
                    run.stop()
        else:
            model = net if loop == "by hand" else DistributedDataParallel(net, gradient_as_bucket_view=True)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
            reset_peak()
            for number in range(STEPS - 1):
                (x,) = data[2 * number : 2 * number + 2]
                F.mse_loss(model(x), x, reduction="sum").backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            peak = kilobytes("VmHWM")
        size = sum(p.numel() * p.element_size() for p in model.parameters()) / 1024
        del model  # DistributedDataParallel must be freed before its group
    return (peak - shared - before) / size


def measure(loop: str, size: int, virtual_ranks: int, width: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(measure_copies, size, loop, virtual_ranks, width, folder)
    spans = assign_evenly(virtual_ranks, size)
    return {
        "loop": loop,
        "processes": size,
        "virtual_ranks": virtual_ranks,
        "copies": max(ranks),
        "subtrees": max(len(subtrees(virtual_ranks, *span)) for span in spans),
        "computing": max(copies(virtual_ranks, *span) for span in spans),
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'':10} processes  virtual ranks  copies of the gradient  r + 2"]
    for row in rows:
        limit = f"{row['subtrees'] + 2:5}" if row["loop"] in ("ours", "messages") else ""
        loop = f"{row['loop']:10} {row['processes']:9}  {row['virtual_ranks']:13}"
        lines.append(f"{loop}  {row['copies']:22.2f}  {limit}".rstrip())
    return "\n".join(lines)


def main() -> None:
    flags = parser(__doc__)
    args = flags.parse_args()
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**20))  # read when a process starts
    rows = [measure(*row, 128 if args.quick else 2048) for row in ROWS]
    show("memory", {"rows": rows}, lambda: table(rows), as_json=args.json)


if __name__ == "__main__":
    main()
