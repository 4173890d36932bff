"""Rules about messages: the exchange of gradients, and the gathering of shards."""

from __future__ import annotations

from statistics import median

from unisono.report.findings.evidence import Evidence, Finding, duration, percent

HALVED = ("fp16", "bf16")

SMALL = 256e3
"""Bytes of a step below which sending half of them saves no time. At 1 Gbit/s they take 2 ms."""

SMALL_ON_A_HOST = 2e6
"""The same where all ranks are on one host. At 1 GB/s they take 2 ms."""


def exchange_bound(run: Evidence) -> Finding | None:
    """Find training that waits for bytes: the rank that waits least for others needs that long for messages."""
    if len(run.ranks) < 2:
        return None
    transfer = min(each.phases["exchange"] for each in run.ranks.values())
    share = transfer / run.step
    if share < 0.2:
        return None
    result, kind = run.files.result, run.settings.get("compress.kind", "none")
    sent = float(result.get("bytes_per_step") or 0)
    evidence = [f"No rank spends less than {duration(transfer)} of a step of {duration(run.step)} in the exchange."]
    if sent:
        evidence.append(f"A process sends {sent / 1e6:.3g} MB in a step, {sent / transfer / 1e6:.3g} MB/s.")
    fact = f"Exchanging gradients takes {percent(share)} of the time."
    hosts = {start.get("host") for start in run.starts.values()}
    if 0 < sent < (SMALL if len(hosts) > 1 else SMALL_ON_A_HOST):  # the time is that of messages, whatever their size
        advice = "fewer --ranks, with the same result; or a larger --set batch, which changes it"
        return Finding("exchange", fact, evidence, advice, share / 2) if run.worth(share / 2) else None
    if kind == "none":
        gain = share / 2  # half of the bytes
        advice = "--set compress.kind=bf16 sends half of the bytes"
    elif kind in HALVED:
        gain, advice = share / 2, "--set compress.kind=int8 sends half of the bytes"
    else:
        gain, advice = share / 2, "a larger --set batch has more work for each exchange"
    return Finding("exchange", fact, evidence, advice, gain, changes_result=True) if run.worth(gain) else None


def gathers(run: Evidence) -> Finding | None:
    """Find shards that are gathered for every micro-batch, although a step could gather them once."""
    if run.number("parallel.shard", 1) < 2 or run.settings.get("parallel.reshard") != "layer":
        return None
    waits = median(max(0.0, each.wait - each.phases["exchange"]) for each in run.ranks.values())
    lines = max(1, len(run.ranks) // int(run.number("parallel.shard", 1)))
    rounds = max(1.0, run.number("virtual_ranks") / lines)
    copies = 2 if run.on_cpu else 1  # on CPUs, copying between parts and layers takes as long again
    gain = min(copies * waits / run.step, 0.9) * (1 - 1 / (2 * rounds))
    evidence = [f"Forward and backward passes wait {duration(waits)} of a step for shards, in {rounds:g} rounds."]
    fact = f"Gathering shards takes {percent(waits / run.step)} of the time."
    advice = "--set parallel.reshard=step gathers them once a step, and needs memory for all layers"
    return Finding("gathers", fact, evidence, advice, gain) if run.worth(gain) else None
