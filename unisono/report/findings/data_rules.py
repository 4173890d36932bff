"""Rules about fetching data."""

from __future__ import annotations

import math
from statistics import median

from unisono.plan.batch_order import BatchOrder
from unisono.report.findings.evidence import Evidence, Finding, duration, percent

MOST_WORKERS = 16
SLEEPING = 0.4
"""A fetch whose thread runs for less than this share of its time waits for storage."""

PASSED = 1.5e-3
"""Seconds in which a loader worker passes a micro-batch to the process that trains.

A tensor takes about 0.4 ms: torch's workers pass it as a file descriptor over a socket. Measured with a
`torch.utils.data.DataLoader` of one worker.
"""


def data_bound(run: Evidence) -> Finding | None:
    """Find training that waits for samples. Workers fetch beside training; more of them fetch more."""
    data, rest = run.middle("data"), run.loop - run.middle("data")
    workers = int(run.number("loader.workers"))
    passed = PASSED * median(_micro_batches(run, rank) for rank in run.ranks)
    if data < 0.1 * run.step or (workers and data <= passed):
        return None
    running: float | None = median(_running_in_data(run, rank) for rank in run.ranks)
    rank = next(iter(run.ranks))
    free = run.cores_of(rank) / run.ranks_beside(rank) - 1  # beside the training thread
    if workers:
        fetch = workers * run.loop  # seconds of a worker for the batch of a step, if all are busy
        busy = _workers_are_busy(run, workers)
        sleeping = busy is not None and busy < SLEEPING
        running = busy
    else:
        fetch, sleeping = data, running is not None and running < SLEEPING
    most = MOST_WORKERS if sleeping else max(int(free), workers)
    more = min(most, math.ceil(1.1 * fetch / max(rest, 1e-9)))
    evidence = [
        f"Waiting for data takes {duration(data)} of a step of {duration(run.step)}, with {workers} loader workers."
    ]
    if running is not None:
        evidence.append(
            f"A fetch runs in {percent(running)} of its time"
            + ("; in the rest it waits for storage." if sleeping else ".")
        )
    fact = f"Training waits for data in {percent(data / run.step)} of its time."
    kind = "storage" if sleeping else "data"
    if more <= workers:
        advice = "make a sample cheaper to read (decode and resize once, and store the result)"
        evidence.append(f"No core is free for another worker ({run.cores_of(rank):g} cores).")
        gain = 0.5 * data / run.step  # of samples that cost half as much
        return Finding(kind, fact, evidence, advice, gain) if run.worth(gain) else None
    gain = (run.loop - max(rest + passed, fetch / more)) / run.step
    return Finding(kind, fact, evidence, f"--set loader.workers={more}", gain) if run.worth(gain) else None


def _micro_batches(run: Evidence, rank: int) -> int:
    """Return the micro-batches that a rank fetches in a step; 1 if it is unknown."""
    batch, virtual = int(run.number("batch")), int(run.number("virtual_ranks"))
    if not batch or not virtual or rank not in run.spans:
        return 1
    size = int(run.number("micro_batch")) or None
    order = BatchOrder(length=batch, batch=batch, virtual_ranks=virtual, micro_batch=size)
    return sum(len(order.micro_bounds(0, virtual_rank)) for virtual_rank in range(*run.spans[rank]))


def _running_in_data(run: Evidence, rank: int) -> float:
    """Return the share of the phase "data" in which a thread had work to do, if it had in all other phases.

    A thread that waits for a core has work to do.
    """
    times = run.ranks[rank]
    data, own = times.phases["data"], times.total - times.wait
    working = times.cpu + run.delayed(rank) * times.total
    return min(1.0, max(0.0, (working - (own - data)) / data)) if data > 0 else 1.0


def _workers_are_busy(run: Evidence, workers: int) -> float | None:
    """Return the share of the time in which a loader worker runs; None if hosts were not sampled."""
    shares = []
    for rank in run.ranks:
        for _, samples in run.hosts.values():
            for sample in samples:
                beside = sample.get("processes", {}).get(str(rank), {}).get("workers", {})
                if beside.get("count"):
                    shares.append(beside["cpu"] / beside["count"])
    return median(shares) if shares else None
