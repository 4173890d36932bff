"""The script that `unisono doctor` runs in two processes: form a group, add two numbers, and measure the time.

    probe.py RESULT.json

It uses plain torch, because it measures the machine and not Unisono. Only the check for shared memory is Unisono's.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import unisono
from unisono.distributed.init import build_group

SMALL, LARGE = 1, 4 * 1024 * 1024
"""Numbers of float32 elements: 4 bytes and 16 MB."""


def main() -> None:
    """Measure, and write the result on rank 0."""
    world = unisono.World.current()
    assert world.store is not None
    torch.set_num_threads(1)
    store = dist.FileStore(world.store.removeprefix("file://"), world.size)
    patience = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=patience)
    ones = torch.ones(SMALL)
    dist.all_reduce(ones)
    result = {
        "sum_is_right": bool(ones.item() == world.size),
        "latency_seconds": seconds_of(torch.ones(SMALL), 200),
        "bytes_per_second": LARGE * 4 / seconds_of(torch.ones(LARGE), 7),
        "neighbors": len(build_group(world, torch.device("cpu")).neighbors) == world.size - 1,
    }
    if world.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(result))
    dist.barrier()  # gloo aborts if a process leaves while its peer still sends
    dist.destroy_process_group()


def seconds_of(tensor: torch.Tensor, times: int) -> float:
    """Return the median time of one all_reduce."""
    taken = []
    for _ in range(times):
        tensor.fill_(1)
        begin = time.perf_counter()
        dist.all_reduce(tensor)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


if __name__ == "__main__":
    main()
