"""Rules about how the work is divided among processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import numpy as np

from unisono.phases import PHASES
from unisono.plan.batch_order import BatchOrder
from unisono.report.findings.evidence import Evidence, Finding, RankTime, duration, percent

SLOWER = 1.2
"""A rank is slow if a sample takes it this many times the median of the others."""

FIXED = 0.25
"""Smallest share of the time that fewer virtual ranks save: they also limit the number of processes."""

LEAST_LINES = 5
"""Steps of a smaller batch that are needed to separate the time of a micro-batch from that of its samples."""


def straggler(run: Evidence) -> Finding | None:
    """Find a rank that takes longer than others for the same work, so that they wait for it."""
    if len(run.ranks) < 2 or run.number("parallel.pipeline", 1) > 1:
        return None
    loads, each_takes = {rank: run.load(span) for rank, span in run.spans.items()}, run.of_sample
    slow = max(each_takes, key=lambda rank: each_takes[rank])
    others = [seconds for rank, seconds in each_takes.items() if rank != slow]
    if not others or each_takes[slow] < SLOWER * median(others):
        return None
    usual = median(others)
    now = max(each_takes[rank] * loads.get(rank, 1) for rank in each_takes)
    then = usual * sum(loads.get(rank, 1) for rank in run.ranks) / len(run.ranks)
    gain = (now - then) / run.step
    rank, host = run.ranks[slow], run.starts[slow].get("host", "its host")
    ran = rank.cpu / max(rank.total - rank.wait, 1e-9)
    evidence = [
        f"Forward and backward take rank {slow} {duration(each_takes[slow])} for a sample, the others "
        f"{duration(usual)}.",
        f"Its thread runs in {percent(min(ran, 1.0))} of the time in which it does not wait for messages.",
    ]
    fact = f"Rank {slow} is slow, and the others wait for it."
    advice = f"look at {host}: other programs, heat, power limits (docs/guide/machines.md); or leave it out"
    return Finding("straggler", fact, evidence, advice, gain) if run.worth(gain) else None


def _own_compute(each: RankTime) -> float:
    """Return the seconds of forward and backward passes, without messages that are waited for in them."""
    return max(each.compute - max(0.0, each.wait - each.phases["exchange"]), 0.0)


def uneven(run: Evidence) -> Finding | None:
    """Find processes that have different amounts of work, because the batch or the virtual ranks do not divide."""
    batch, virtual = int(run.number("batch")), int(run.number("virtual_ranks"))
    spans = run.spans
    if len(spans) < 2 or not batch or not virtual or not _is_data_parallel(run):
        return None
    loads = {rank: run.load(span) for rank, span in spans.items()}
    if sum(loads.values()) != batch or max(run.of_sample.values()) > SLOWER * min(run.of_sample.values()):
        return None  # several ranks compute a span; or the assignment follows their speed
    mean, most = sum(loads.values()) / len(loads), max(loads.values())
    gain = (1 - mean / most) * max(_own_compute(each) for each in run.ranks.values()) / run.step
    ranks = len(loads)
    evidence = [
        f"{virtual} virtual ranks on {ranks} processes, {batch} samples in a batch: "
        f"at most {most} samples on a process, {mean:g} on average."
    ]
    fact = "Processes have different amounts of work, and wait for each other."
    if virtual % ranks:
        close = [n for n in (*range(ranks, 2 * ranks + 1), *range(ranks, 0, -1)) if virtual % n == 0]
        advice = f"--ranks {close[0]}, which divides virtual_ranks={virtual}"
        advice += f"; in a new run, --set virtual_ranks={-(-virtual // ranks) * ranks}"
        return Finding("uneven", fact, evidence, advice, gain) if run.worth(gain) else None
    advice = f"--set batch={-(-batch // virtual) * virtual}, a multiple of the virtual ranks"
    return Finding("uneven", fact, evidence, advice, gain, changes_result=True) if run.worth(gain) else None


def _is_data_parallel(run: Evidence) -> bool:
    return all(run.number(f"parallel.{axis}", 1) == 1 for axis in ("shard", "tensor", "pipeline", "context"))


class Work(NamedTuple):
    """What a rank computes in a step."""

    micro_batches: int
    samples: int


def _work(order: BatchOrder, step: int, span: tuple[int, int]) -> Work:
    sizes = [stop - start for virtual_rank in range(*span) for start, stop in order.micro_bounds(step, virtual_rank)]
    return Work(len(sizes), sum(sizes))


def _seconds_of_a_micro_batch(run: Evidence, rank: int, order: BatchOrder) -> float | None:
    """Return the seconds that a micro-batch takes whatever its size.

    The last batch of an epoch is smaller, and is divided into as many micro-batches. So its time shows what a sample
    takes, and the rest is what a micro-batch takes. None: no batch is smaller, or too few are.
    """
    last = order.steps_per_epoch - 1
    whole, short = _work(order, 0, run.spans[rank]), _work(order, last, run.spans[rank])
    determinant = whole.micro_batches * short.samples - short.micro_batches * whole.samples
    if abs(determinant) < 0.2 * whole.micro_batches * whole.samples:
        return None  # both batches have micro-batches of nearly the same size
    without_end, with_end = [], []
    for first, steps, seconds in _computing(run, rank):
        ends = order.epoch(first + steps) - order.epoch(first)
        if ends == 0:
            without_end.append(seconds / steps)
        elif ends == 1:
            with_end.append((seconds, steps - 1))
    if min(len(without_end), len(with_end)) < LEAST_LINES:
        return None
    in_whole = median(without_end)
    in_short = median(seconds - others * in_whole for seconds, others in with_end)
    return (in_whole * short.samples - in_short * whole.samples) / determinant


def _computing(run: Evidence, rank: int) -> Iterator[tuple[int, int, float]]:
    """Yield (first step, number of steps, seconds of forward and backward) of lines with the present assignment."""
    columns, assigned = run.columns[rank], run.assigned_at(rank)
    seconds = columns.seconds[:, [PHASES.index("forward"), PHASES.index("backward")]].sum(1)
    waited = np.maximum(columns.wait - columns.seconds[:, PHASES.index("exchange")], 0.0)
    for row in range(run.warm_up(rank), len(seconds)):
        if columns.first[row] < assigned:
            continue
        yield int(columns.first[row]), int(columns.steps[row]), float(seconds[row] - waited[row])


def micro_batches(run: Evidence) -> Finding | None:
    """Find micro-batches that are so small that their number, and not their samples, takes the time."""
    batch, virtual = int(run.number("batch")), int(run.number("virtual_ranks"))
    length, ranks = run.samples_per_epoch, len(run.spans)
    if not ranks or not batch or not length or not run.on_cpu or not _is_data_parallel(run):
        return None
    largest = int(run.number("micro_batch")) or None
    order = BatchOrder(length=length, batch=batch, virtual_ranks=virtual, micro_batch=largest)
    rank = max(run.spans, key=lambda each: _own_compute(run.ranks[each]))
    takes = _seconds_of_a_micro_batch(run, rank, order)
    if takes is None or takes <= 0:
        return None
    now = _work(order, 0, run.spans[rank])
    choices = list(fewer_micro_batches(order, now.micro_batches, ranks))
    if not choices:
        return None
    advice, count = next((each for each in choices if takes * each[1] < 0.1 * run.step), choices[-1])
    share = min(1.0, takes * now.micro_batches / run.step)
    gain = share * (1 - count / now.micro_batches)
    evidence = [
        f"A micro-batch takes {duration(takes)} plus the time of its samples, as the last batch of an epoch shows.",
        f"Rank {rank} computes {now.micro_batches} of them for {now.samples} samples in a step of "
        f"{duration(run.step)}.",
    ]
    fact = f"Micro-batches are small: what each costs whatever its size takes {percent(share)} of the time."
    found = Finding("micro-batches", fact, evidence, advice, gain, changes_result=True)
    return found if gain >= FIXED and run.worth(gain) else None


def fewer_micro_batches(order: BatchOrder, now: int, ranks: int) -> Iterator[tuple[str, float]]:
    """Yield settings with fewer micro-batches than `now`, and their mean number on a rank, from many to few.

    Where `micro_batch` cuts virtual ranks into several micro-batches, they become larger; otherwise a new run has fewer
    virtual ranks.
    """
    share = -(-order.batch // order.virtual_ranks)
    if order.micro_batch is not None and order.micro_batch < share:
        size = 2 * order.micro_batch
        while size < 2 * share:
            size = min(size, share)
            count = _work(replace(order, micro_batch=size), 0, (0, order.virtual_ranks)).micro_batches / ranks
            yield f"--set micro_batch={size}, if memory allows", count
            size *= 2
        return
    for virtual in range(order.virtual_ranks - 1, ranks - 1, -1):
        if virtual % ranks == 0:
            count = _work(replace(order, virtual_ranks=virtual), 0, (0, virtual)).micro_batches / ranks
            if count < now:
                yield f"in a new run, --set virtual_ranks={virtual}", count


def bubbles(run: Evidence) -> Finding | None:
    """Find a pipeline whose stages wait: of m micro-batches on p stages, p - 1 are not overlapped (GPipe, 2019)."""
    stages = int(run.number("parallel.pipeline", 1))
    batch, virtual = int(run.number("batch")), int(run.number("virtual_ranks"))
    if stages < 2 or not batch or not virtual:
        return None
    lines = max(1, len(run.ranks) // stages)
    size = batch / virtual
    pieces = -(-size // run.number("micro_batch", size)) if size else 1
    micro = max(1.0, virtual * pieces / lines)
    smaller = max(1, int(size / pieces) // 2)
    more = max(1.0, virtual * -(-size // smaller) / lines)
    busy = max(
        each.compute - max(0.0, each.wait - each.phases["exchange"] - each.phases["other"])
        for each in run.ranks.values()
    )
    gain = busy * ((micro + stages - 1) / micro - (more + stages - 1) / more) / run.step
    idle = (stages - 1) / (micro + stages - 1)
    evidence = [
        f"{micro:g} micro-batches run through {stages} stages in a step: stages are idle in {percent(idle)} of it."
    ]
    fact = "The stages of the pipeline wait for each other."
    advice = f"--set micro_batch={smaller}"
    found = Finding("bubbles", fact, evidence, advice, gain, changes_result=True)
    return found if more > micro and run.worth(gain) else None
