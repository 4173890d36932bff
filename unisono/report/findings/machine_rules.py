"""Rules about machines: cores, memory, heat, accelerators. They read the samples of hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from unisono.report.findings.evidence import Evidence, Finding, mean_of, percent, values_of

NEARLY_FULL = 0.05
"""Share of the memory that is left when it is nearly full."""

IDLE = 0.7
"""Utilization of an accelerator that is not busy."""

COPYING = 0.3
"""Share of the capacity of the link between a host and a device that is used when copies take time."""


def threads(run: Evidence) -> Finding | None:
    """Find more threads than cores: torch's threads wait for each other, and for a core."""
    for host, (facts, samples) in run.hosts.items():
        wanted = float(facts.get("ranks", 0)) * float(facts.get("threads", 0))
        cores = run.cores_of(int(facts.get("rank", 0)))
        delayed = _delayed(samples)
        if not cores or wanted <= cores or delayed is None or facts.get("threads", 1) == 1:
            continue
        fewer = max(1, int(cores // float(facts["ranks"])))
        evidence = [
            f"{facts['ranks']} processes with {facts['threads']} threads each share the {cores:g} cores of {host}.",
            f"Their main threads wait for a core in {percent(delayed)} of the time.",
        ]
        fact = f"{host} has more threads than cores."
        if run.worth(delayed):  # what it saves depends on how much the threads wait for each other
            return Finding("threads", fact, evidence, f"--set threads={fewer}", None)
    return None


def shared_cores(run: Evidence) -> Finding | None:
    """Find programs that take cores away from the run's processes."""
    for host, (facts, samples) in run.hosts.items():
        delayed, busy, cores = _delayed(samples), mean_of(samples, "cpu"), float(facts.get("cpus") or 0)
        ours = _cores_in_use(samples)
        wanted = float(facts.get("ranks", 0)) * float(facts.get("threads", 1))
        if delayed is None or busy is None or ours is None or not cores or wanted > float(facts.get("cores") or cores):
            continue
        others = busy * cores - ours
        if others < 0.25 * cores:
            continue
        evidence = [
            f"Programs that are not of this run use {others:.2g} of the {cores:g} cores of {host}.",
            f"Main threads of the run wait for a core in {percent(delayed)} of the time.",
        ]
        fact = f"Other programs on {host} take cores away from the run."
        if run.worth(delayed):
            return Finding("shared-cores", fact, evidence, "stop them, or train on another host", delayed)
    return None


def quota(run: Evidence) -> Finding | None:
    """Find a container whose quota of processor time is used up before its period ends."""
    for host, (facts, samples) in run.hosts.items():
        throttled = mean_of(samples, "cgroup", "throttled_periods")
        if throttled is None or throttled < 0.1:
            continue
        cores = (facts.get("cgroup") or {}).get("cpus")
        evidence = [
            f"The quota{f' of {cores:g} cores' if cores else ''} is used up in {percent(throttled)} of its periods."
        ]
        wanted = float(facts.get("ranks", 1)) * float(facts.get("threads", 1))
        fact = f"The container on {host} may not use the cores that its threads need."
        advice = "raise its limit of cores" + (f" to {wanted:g}" if cores and wanted > cores else "")
        if cores and wanted > cores and int(cores) >= 1 and facts.get("threads", 1) > 1:
            advice += f", or --set threads={max(1, int(cores / float(facts.get('ranks', 1))))}"
        return Finding("quota", fact, evidence, advice, None)
    return None


def memory(run: Evidence) -> Finding | None:
    """Find memory that is nearly full: the run may be killed at any step."""
    for host, (facts, samples) in run.hosts.items():
        total = (facts.get("memory") or {}).get("total")
        available = values_of(samples, "memory", "available")
        limit, used = (facts.get("cgroup") or {}).get("memory"), values_of(samples, "cgroup", "memory")
        left = min(available) / total if total and available else 1.0
        if limit and used:
            left = min(left, 1 - max(used) / limit)
        if left < NEARLY_FULL:
            evidence = [f"At least {percent(max(left, 0.0))} of the memory of {host} was free."]
            return _need_less("memory", f"The memory of {host} is nearly full.", evidence, run)
    for host, (facts, samples) in run.hosts.items():
        for device in facts.get("devices") or ():
            total = device.get("memory")
            used = [s["memory"] for s in _device(samples, device.get("index")) if "memory" in s]
            if total and used and max(used) > (1 - NEARLY_FULL) * total:
                evidence = [
                    f"Up to {percent(max(used) / total)} of the memory of device {device.get('index')} were in use."
                ]
                fact = f"The memory of a device of {host} is nearly full."
                return _need_less("memory", fact, evidence, run)
    return None


def swapping(run: Evidence) -> Finding | None:
    """Find memory pages that move to the disk and back."""
    for host, (_, samples) in run.hosts.items():
        moved = [
            a + b
            for a, b in zip(
                values_of(samples, "memory", "swap_in"), values_of(samples, "memory", "swap_out"), strict=False
            )
        ]
        if moved and sum(moved) / len(moved) > 1e6 and median(moved) > 0:
            evidence = [f"{sum(moved) / len(moved) / 1e6:.3g} MB a second move between memory and swap space."]
            return _need_less("swapping", f"{host} swaps.", evidence, run)
    return None


def heat(run: Evidence) -> Finding | None:
    """Find processors and accelerators that slow down because of heat or power."""
    for host, (_, samples) in run.hosts.items():
        share = mean_of(samples, "cores", "throttled")
        if share is not None and share > 0.1:
            evidence = [f"Its processor was slowed down because of heat in {percent(share)} of the time."]
            return Finding("heat", f"{host} is too hot.", evidence, "improve its cooling, or lower its load", share)
        reasons: dict[str, int] = {}
        for sample in samples:
            for device in sample.get("devices") or ():
                for reason in device.get("throttled") or ():
                    reasons[reason] = reasons.get(reason, 0) + 1
        for reason, count in reasons.items():
            if reason != "power" and samples and count > 0.2 * len(samples):
                evidence = [
                    f"A device had a lower clock ({reason}) in {percent(min(1.0, count / len(samples)))} of samples."
                ]
                fact = f"An accelerator of {host} is slowed down."
                return Finding("heat", fact, evidence, "improve its cooling and its power supply", None)
    return None


def copies(run: Evidence) -> Finding | None:
    """Find accelerators that wait for copies between them and the host's memory."""
    for host, (facts, samples) in run.hosts.items():
        for device in facts.get("devices") or ():
            known = _device(samples, device.get("index"))
            moved = [d["from_host"] + d["to_host"] for d in known if "from_host" in d and "to_host" in d]
            used = [d["utilization"] for d in known if "utilization" in d]
            link = device.get("link")
            if not moved or not used or not link or median(used) > IDLE or median(moved) < COPYING * link:
                continue
            evidence = [
                f"{median(moved) / 1e9:.3g} GB a second pass between the host and device {device['index']} of {host}, "
                f"whose link carries {link / 1e9:.3g} GB a second.",
                f"The device computes in {percent(median(used))} of the time.",
            ]
            fact = "The accelerators wait for copies to and from the host's memory."
            advice = (
                "keep tensors on the device in the loop (no .cpu(), .to(...) or .item()), and send samples in the "
                "dtype in which they are stored (uint8 for images)"
            )
            return Finding("copies", fact, evidence, advice, None)
    return None


def launch_bound(run: Evidence) -> Finding | None:
    """Find accelerators that wait for Python to launch kernels."""
    if run.on_cpu:
        return None
    data, wait = run.middle("data"), median(each.wait for each in run.ranks.values())
    running = median(each.cpu / max(each.total - each.wait, 1e-9) for each in run.ranks.values())
    for host, (_, samples) in run.hosts.items():
        used = [d["utilization"] for s in samples for d in s.get("devices") or () if "utilization" in d]
        if not used or median(used) > IDLE or running < 0.8 or data + wait > 0.3 * run.step or copies(run) is not None:
            continue
        evidence = [
            f"The devices of {host} compute in {percent(median(used))} of the time.",
            f"The training thread runs Python in {percent(running)} of its time.",
        ]
        fact = "The accelerators wait for Python to launch kernels."
        advice = (
            "--set parallel.cuda_graphs=true (with step.run), or --set parallel.compile=true, or a larger micro_batch"
        )
        return Finding("launches", fact, evidence, advice, 1 - median(used))
    return None


def _need_less(kind: str, fact: str, evidence: Sequence[str], run: Evidence) -> Finding:
    """Return a finding with the advice to need less memory."""
    size = int(run.number("micro_batch", run.number("batch") / max(run.number("virtual_ranks", 1), 1)))
    half = f"--set micro_batch={max(1, size // 2)}" if size > 1 else "--set parallel.shard=2"
    advice = f"{half}, or --set parallel.activation_checkpoint=full"
    return Finding(kind, fact, evidence, advice, None, changes_result=size > 1)


def _delayed(samples: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the mean share of the time in which main threads of the run wait for a core: of the most delayed rank."""
    by_rank: dict[str, list[float]] = {}
    for sample in samples:
        for rank, process in (sample.get("processes") or {}).items():
            if "delayed" in process:
                by_rank.setdefault(rank, []).append(process["delayed"])
    return max((sum(values) / len(values) for values in by_rank.values()), default=None)


def _cores_in_use(samples: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the mean number of cores that the processes of the run and their loader workers use."""
    used = [
        sum(
            process.get("cpu", 0.0) + process.get("workers", {}).get("cpu", 0.0)
            for process in sample["processes"].values()
        )
        for sample in samples
        if sample.get("processes")
    ]
    return sum(used) / len(used) if used else None


def _device(samples: Sequence[Mapping[str, Any]], index: Any) -> list[Mapping[str, Any]]:
    return [d for sample in samples for d in sample.get("devices") or () if d.get("index") == index]
