"""Measure what a process costs as processes grow: real processes, and the plan of ranks that do not exist.

    python -m benchmarks.growth                        2 to 128 processes; plans of 1,024 and 16,384 ranks
    python -m benchmarks.growth --most 32 --uneven     fewer processes, with unequal numbers of virtual ranks

Processes are forked from one that has loaded torch, and meet at the real rendezvous server. The time of connecting is
that of the slowest process. Requests and threads are those of process 0, and memory is its own (Linux's Private_Clean
and Private_Dirty). Each process counts as a host of its own, and exchanges a gradient of a toy model: with gloo by
direct messages and by halving in turn, with the back end tcp by halving. Reported are the median time on process 0, its
messages a bucket, and the most sockets of a process after that. The plan is computed by the library's own functions, in
processor seconds.
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
from unisono.plan.halving import find_halving
from unisono.plan.host_routes import HostRoutes
from unisono.plan.reduction_tree import Plan

EXCHANGES = 5
"""Gradients that are exchanged in each way."""
PARAMETERS, ELEMENTS = 4, 2**18
"""The toy model: parameters of 1 MB."""

RANKS = 8
"""Of how many ranks of a plan the messages and peers are counted; the most is reported."""

PLANS = [(1024, 1024), (4096, 1000), (16384, 16384), (16384, 12000), (65536, 16384)]


def join(rank: int, size: int, path: str, results: Any, backend: str, uneven: bool) -> None:
    """Connect one process, and put what it costs into `results`."""
    import torch
    import torch.distributed as dist

    from unisono.distributed.connections.collective_group import register
    from unisono.distributed.rendezvous.connect import connect
    from unisono.distributed.rendezvous.store import RendezvousStore

    if backend == "tcp":
        register(socket.gethostname())
    torch.set_num_threads(1)
    store = RendezvousStore.at(path, timedelta(minutes=10))
    began = time.perf_counter()
    connect(store, rank, size, backend)
    seconds = time.perf_counter() - began
    dist.barrier()
    private = re.findall(r"Private_\w+:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    threads = len(os.listdir("/proc/self/task"))
    memory = sum(map(int, private)) / 1024
    ways = (size + 1, 2) if backend == "gloo" else (2,)
    exchanges = [exchange_gradients(rank, size, fewest, backend, uneven) for fewest in ways]
    timed: list[list[float]] = [[] for _ in ways]
    for _ in range(EXCHANGES):
        for times, (exchange_once, _) in zip(timed, exchanges, strict=True):
            dist.barrier()
            began = time.perf_counter()
            exchange_once()
            times.append(time.perf_counter() - began)
    cells = [(median(times), messages) for times, (_, messages) in zip(timed, exchanges, strict=True)]
    names = (Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
    sockets = sum(name.is_symlink() and "socket:" in str(os.readlink(name)) for name in names)
    results.put((rank, seconds, store.requests, sockets, threads, memory, cells))
    dist.barrier()
    time.sleep(0.2)
    dist.destroy_process_group()


def exchange_gradients(
    rank: int, size: int, fewest: int, backend: str, uneven: bool
) -> tuple[Callable[[], None], float]:
    """Return a function that exchanges one gradient, and the number of messages that this sends for each bucket.

    Args:
        rank: This process.
        size: The number of processes, each on a host of its own.
        fewest: From how many hosts on they halve.
        backend: The name of the back end.
        uneven: Whether processes have unequal numbers of virtual ranks.
    """
    import torch
    import torch.distributed as dist

    from unisono.distributed.process_group import ProcessGroup
    from unisono.exchange.tree.tree_exchange import TreeExchange
    from unisono.plan import halving

    params = [torch.nn.Parameter(torch.zeros(ELEMENTS)) for _ in range(PARAMETERS)]
    leaves = 3 * size if uneven else size
    exchange = TreeExchange(params, leaves, ProcessGroup(rank, size, hosts=tuple(range(size)), backend=backend))
    spans = assign(leaves, speeds_of(size)) if uneven else assign_evenly(size, size)
    mine = range(*spans[rank])

    def once() -> None:
        halving.FEWEST_HOSTS = fewest
        exchange.begin(spans, dict.fromkeys(mine, 1), lambda: torch.ones(len(mine), dtype=torch.float64))
        for virtual_rank in mine:
            exchange.enter(virtual_rank, last=virtual_rank == mine[-1])
            torch.stack([p.sum() for p in params]).sum().backward()
            exchange.leave()
        exchange.launch()
        exchange.finish(leaves)
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


def speeds_of(size: int) -> list[float]:
    """Return unlike speeds of processes, the same each time."""
    return [1 + random.Random(rank).random() for rank in range(size)]


def connect_all(context: Any, size: int, backend: str, uneven: bool) -> str:
    """Return a row of the table for `size` real processes."""
    with tempfile.TemporaryDirectory(prefix="u-") as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/s")
        listener.listen(1024)
        server = RendezvousServer(listener, size, silence=600.0, notify=lambda event: None)
        thread = threading.Thread(target=server.serve, daemon=True)
        thread.start()
        results = context.Queue()
        more = (size, f"{folder}/s", results, backend, uneven)
        processes = [context.Process(target=join, args=(rank, *more)) for rank in range(size)]
        for process in processes:
            process.start()
        rows = sorted(results.get(timeout=600) for _ in processes)
        for process in processes:
            process.join()
        keys = len(server.keys.values)
        server.close()
        thread.join()
    _, _, requests, _, threads, memory, exchanges = rows[0]
    slowest = max(row[1] for row in rows)
    total, sockets = sum(row[2] for row in rows), max(row[3] for row in rows)
    start = f"{slowest:.2f} | {requests} | {total} | {keys} | {sockets} | {threads} | {memory:.0f}"
    cells = [(f"{messages:.1f}", f"{1000 * seconds:.0f}") for seconds, messages in exchanges]
    (many, direct), (few, halved) = cells if len(cells) > 1 else [("", ""), *cells]
    return f"| {size} | {backend} | {start} | {many} | {few} | {direct} | {halved} |"


def plan_of(virtual_ranks: int, size: int, *, even: bool) -> str:
    """Return a row of the table for the plan of `size` ranks."""
    began = time.process_time()
    spans = assign_evenly(virtual_ranks, size) if even else assign(virtual_ranks, speeds_of(size))
    assigned = time.process_time()
    plan = Plan(virtual_ranks, tuple(spans))
    additions = len(plan.additions())
    ended = time.process_time()
    sums = max(len(plan.sends(rank)) for rank in range(size))
    found = [halve(plan, rank) for rank in range(0, size, -(-size // RANKS))]
    seconds, messages, peers = (max(column) for column in zip(*found, strict=True))
    how = "equal" if even else "random"
    cells = f"{assigned - began:.2f} | {ended - assigned:.2f} | {seconds:.2f} | {sums} | {additions}"
    return f"| {size} | {virtual_ranks} | {how} | {cells} | {(sums + 1) * (size - 1)} | {messages} | {peers} |"


def halve(plan: Plan, rank: int) -> tuple[float, int, int]:
    """Return the seconds of planning to halve between hosts of one process, and the messages and peers of a rank."""
    began = time.process_time()
    halving = find_halving(HostRoutes(plan, range(plan.size), rank))
    assert halving is not None
    rounds = halving.rounds(1 << 20, 16)
    seconds = time.process_time() - began
    sends = [part.rank for now in rounds for _, part in now.sends]
    gathers = halving.gather_totals(1 << 20, 16)
    peers = {*sends, *(now.to for now in gathers), *(now.source for now in gathers)}
    for merge in (merge for now in rounds for merge in now.merges):
        peers |= {part.rank for operand in (merge.left, merge.right) for part in operand.parts} - {rank}
    return seconds, len(sends) + sum(len(now.sent) for now in gathers), len(peers)


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--fewest", type=int, default=2, help="the smallest number of processes")
    flags.add_argument("--most", type=int, default=128, help="the largest number of processes")
    flags.add_argument("--uneven", action="store_true", help="unequal numbers of virtual ranks")
    args = flags.parse_args()
    print(
        "| ranks | V | speeds | assign, s | additions, s | halving, s | partial sums | additions "
        "| messages a process and bucket, direct | halving | peers |"
    )
    for virtual_ranks, size in PLANS:
        for even in (True, False):
            print(plan_of(virtual_ranks, size, even=even), flush=True)
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "unisono.distributed.rendezvous.connect"])
    print(
        "| processes | back end | connect, s | requests | requests of all | keys | sockets | threads | private MB "
        "| messages a bucket, direct | halving | exchange in ms, direct | halving |"
    )
    size = args.fewest
    while size <= args.most:
        for backend in ("gloo", "tcp"):
            print(connect_all(context, size, backend, args.uneven), flush=True)
        size *= 2


if __name__ == "__main__":
    main()
