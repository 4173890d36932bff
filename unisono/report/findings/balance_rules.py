"""Rules about how the work is divided among processes."""

from __future__ import annotations

from statistics import median

from unisono.report.findings.evidence import Evidence, Finding, RankTime, duration, percent

SLOWER = 1.2
"""A rank is slow if a sample takes it this many times the median of the others."""


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
    parallel = (run.number(f"parallel.{axis}", 1) for axis in ("shard", "tensor", "pipeline", "context"))
    if len(spans) < 2 or not batch or not virtual or any(axis > 1 for axis in parallel):
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
    compute = run.loop - run.middle("update") - run.middle("data")
    gain = (1 - ((more + stages - 1) / more) / ((micro + stages - 1) / micro)) * compute / run.step
    idle = (stages - 1) / (micro + stages - 1)
    evidence = [
        f"{micro:g} micro-batches run through {stages} stages in a step: stages are idle in {percent(idle)} of it."
    ]
    fact = "The stages of the pipeline wait for each other."
    advice = f"--set micro_batch={smaller}"
    return Finding("bubbles", fact, evidence, advice, gain) if more > micro and run.worth(gain) else None
