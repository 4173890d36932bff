"""Measure what a process costs as processes grow: real processes, and the plan of ranks that do not exist.

    python -m benchmarks.growth              2 to 128 processes; plans of 1,024 and 16,384 ranks
    python -m benchmarks.growth --most 32    fewer processes

Processes are forked from one that has loaded torch, and meet at the real rendezvous server. The time of connecting is
that of the slowest process. Requests, sockets and threads are those of process 0, and memory is its own (Linux's
Private_Clean and Private_Dirty). Each process counts as a host of its own, and exchanges a gradient of a toy model,
with direct messages and with halving in turn: the median time on process 0, and its messages a bucket. The plan is
computed by the library's own functions, in processor seconds.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import random
import re
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

from unisono.launcher.rendezvous_server import RendezvousServer
from unisono.plan.assignment import assign, assign_evenly
from unisono.plan.reduction_tree import Plan

EXCHANGES = 5
"""Gradients that are exchanged in each way."""
PARAMETERS, ELEMENTS = 4, 2**18
"""The toy model: parameters of 1 MB."""

PLANS = [(1024, 1024), (4096, 1000), (16384, 16384), (16384, 12000), (65536, 16384)]


def join(rank: int, size: int, path: str, results: Any) -> None:
    """Connect one process, and put what it costs into `results`."""
    import torch
    import torch.distributed as dist

    from unisono.distributed.rendezvous.connect import connect
    from unisono.distributed.rendezvous.store import RendezvousStore

    torch.set_num_threads(1)
    store = RendezvousStore.at(path, timedelta(minutes=10))
    began = time.perf_counter()
    connect(store, rank, size, "gloo")
    seconds = time.perf_counter() - began
    dist.barrier()
    names = (Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
    sockets = sum(name.is_symlink() and "socket:" in str(os.readlink(name)) for name in names)
    private = re.findall(r"Private_\w+:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    threads = len(os.listdir("/proc/self/task"))
    memory = sum(map(int, private)) / 1024
    exchanges = [exchange_gradients(rank, size, fewest) for fewest in (size + 1, 2)]
    timed: list[list[float]] = [[], []]
    for _ in range(EXCHANGES):
        for times, (exchange_once, _) in zip(timed, exchanges, strict=True):
            dist.barrier()
            began = time.perf_counter()
            exchange_once()
            times.append(time.perf_counter() - began)
    cells = [(median(times), messages) for times, (_, messages) in zip(timed, exchanges, strict=True)]
    results.put((rank, seconds, store.requests, sockets, threads, memory, cells))
    dist.barrier()
    time.sleep(0.2)
    dist.destroy_process_group()


def exchange_gradients(rank: int, size: int, fewest: int) -> tuple[Callable[[], None], float]:
    """Return a function that exchanges one gradient, and the number of messages that this sends for each bucket.

    Args:
        rank: This process.
        size: The number of processes, each on a host of its own.
        fewest: From how many hosts on partners halve and double.
    """
    import torch
    import torch.distributed as dist

    from unisono.distributed.process_group import ProcessGroup
    from unisono.exchange.tree.tree_exchange import TreeExchange
    from unisono.plan import halving

    params = [torch.nn.Parameter(torch.zeros(ELEMENTS)) for _ in range(PARAMETERS)]
    exchange = TreeExchange(params, size, ProcessGroup(rank, size, hosts=tuple(range(size))))
    spans = assign_evenly(size, size)

    def once() -> None:
        halving.FEWEST_HOSTS = fewest
        exchange.begin(spans, {rank: 1}, lambda: torch.ones(1, dtype=torch.float64))
        exchange.enter(rank, last=True)
        torch.stack([p.sum() for p in params]).sum().backward()
        exchange.leave()
        exchange.launch()
        exchange.finish(size)
        exchange.commit()
        assert all(bool((p.grad == 1).all()) for p in params if p.grad is not None)
        exchange.zero()

    send, sent = dist.isend, [0]

    def count(*arguments: Any, **more: Any) -> Any:
        sent[0] += 1
        return send(*arguments, **more)

    dist.isend = count
    once()
    dist.isend = send
    return once, sent[0] / len(exchange.layout.buckets)


def connect_all(context: Any, size: int) -> str:
    """Return a row of the table for `size` real processes."""
    with tempfile.TemporaryDirectory(prefix="u-") as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/s")
        listener.listen(1024)
        server = RendezvousServer(listener, size, silence=600.0, notify=lambda event: None)
        thread = threading.Thread(target=server.serve, daemon=True)
        thread.start()
        results = context.Queue()
        processes = [context.Process(target=join, args=(rank, size, f"{folder}/s", results)) for rank in range(size)]
        for process in processes:
            process.start()
        rows = sorted(results.get(timeout=600) for _ in processes)
        for process in processes:
            process.join()
        keys = len(server.keys.values)
        server.close()
        thread.join()
    _, _, requests, sockets, threads, memory, ((direct, many), (halved, few)) = rows[0]
    slowest = max(row[1] for row in rows)
    total = sum(row[2] for row in rows)
    start = f"{slowest:.2f} | {requests} | {total} | {keys} | {sockets} | {threads} | {memory:.0f}"
    return f"| {size} | {start} | {many:.1f} | {few:.1f} | {1000 * direct:.0f} | {1000 * halved:.0f} |"


def plan_of(virtual_ranks: int, size: int, *, even: bool) -> str:
    """Return a row of the table for the plan of `size` ranks."""
    speeds = [1 + random.Random(rank).random() for rank in range(size)]
    began = time.process_time()
    spans = assign_evenly(virtual_ranks, size) if even else assign(virtual_ranks, speeds)
    assigned = time.process_time()
    plan = Plan(virtual_ranks, spans)
    additions = len(plan.additions())
    ended = time.process_time()
    sums = max(len(plan.sends(rank)) for rank in range(size))
    how = "equal" if even else "random"
    cells = f"{assigned - began:.2f} | {ended - assigned:.2f} | {sums} | {additions} | {(sums + 1) * (size - 1)}"
    return f"| {size} | {virtual_ranks} | {how} | {cells} |"


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--fewest", type=int, default=2, help="the smallest number of processes")
    flags.add_argument("--most", type=int, default=128, help="the largest number of processes")
    args = flags.parse_args()
    print(
        "| ranks | V | speeds | assign, s | additions, s | partial sums | additions | messages a process and bucket |"
    )
    for virtual_ranks, size in PLANS:
        for even in (True, False):
            print(plan_of(virtual_ranks, size, even=even), flush=True)
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "unisono.distributed.rendezvous.connect"])
    print(
        "| processes | connect, s | requests | requests of all | keys | sockets | threads | private MB "
        "| messages a bucket, direct | halving | exchange in ms, direct | halving |"
    )
    size = args.fewest
    while size <= args.most:
        print(connect_all(context, size), flush=True)
        size *= 2


if __name__ == "__main__":
    main()
