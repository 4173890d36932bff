"""Rules about what the loop does beside its micro-batches: checkpoints, evaluations, the script's own code."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from unisono.phases import PHASES
from unisono.report.findings.evidence import Evidence, Finding, RankTime, duration, percent

WANTED = 0.05
"""Share of the time that checkpoints or evaluations should have at most."""


def _times(run: Evidence, phase: str) -> int:
    """Return how often a phase happened, after the first lines."""
    columns = next(iter(run.columns.values()))
    return int(np.count_nonzero(columns.seconds[3:, PHASES.index(phase)] > 1e-4))


def _fewer(share: float) -> int:
    """Return by which factor something must become rarer to take the wanted share of the time."""
    return max(1, math.ceil(share / max(1 - share, 1e-3) * (1 - WANTED) / WANTED))


def _too_often(run: Evidence, kind: str, phase: str, doing: str, advice: Callable[[int], str]) -> Finding | None:
    """Find something beside the steps that takes too much of the time.

    Args:
        run: The evidence.
        kind: The kind of the finding, a plural.
        phase: Its phase.
        doing: The beginning of a sentence about it.
        advice: Is called with the factor by which it must become rarer.
    """
    share, times = run.middle(phase) / run.step, _times(run, phase)
    factor = _fewer(share)
    gain = share * (1 - 1 / factor)
    if times < 3 or factor == 1 or not run.worth(gain):
        return None
    evidence = [f"{times} {kind} take {duration(run.middle(phase) * run.steps / times)} each."]
    return Finding(kind, f"{doing} takes {percent(share)} of the time.", evidence, advice(factor), gain)


def checkpoints(run: Evidence) -> Finding | None:
    """Find checkpoints that take too much of the time."""
    every = int(run.number("checkpoint.every"))
    if not every:
        return None

    def advice(factor: int) -> str:
        return f"--set checkpoint.every={every * factor}"

    return _too_often(run, "checkpoints", "checkpoint", "Saving checkpoints", advice)


def evaluations(run: Evidence) -> Finding | None:
    """Find evaluations that take too much of the time."""

    def advice(factor: int) -> str:
        return f"evaluate {factor} times less often, or on fewer samples"

    return _too_often(run, "evaluations", "evaluate", "Evaluating", advice)


def garbage(run: Evidence) -> Finding | None:
    """Find collections of Python's oldest generation, which visit every object of the process."""
    slowest = max(run.ranks.values(), key=lambda each: each.gc)
    gain = slowest.gc / run.step
    evidence = [f"On rank {slowest.rank} collections take {duration(slowest.gc)} of a step of {duration(run.step)}."]
    fact = f"Python's garbage collector takes {percent(gain)} of the time."
    advice = "gc.collect(); gc.freeze() before the loop, so that objects that stay are not visited again"
    return Finding("garbage", fact, evidence, advice, gain) if run.worth(gain) else None


def _of_script(each: RankTime) -> float:
    """Return the seconds of the phase "other", without messages that are waited for (between stages of a pipeline)."""
    return each.phases["other"] - each.gc - max(0.0, each.wait - each.phases["exchange"])


def script(run: Evidence) -> Finding | None:
    """Find code of the script between the parts of a step: logging, plots, metrics, copies to the host."""
    slowest = max(run.ranks.values(), key=_of_script)
    others = [_of_script(each) for each in run.ranks.values() if each is not slowest]
    spent = _of_script(slowest)
    gain = spent / run.step
    if gain < 0.15:
        return None
    evidence = [f"On rank {slowest.rank} it takes {duration(spent)} of a step of {duration(run.step)}."]
    if others and max(others) < 0.5 * spent:
        evidence.append(f"The others need {duration(max(others))} at most, and wait.")
    fact = f"The script's own code in the loop takes {percent(gain)} of the time."
    advice = (
        "do it in fewer steps (if step.every(100): ...); --set profile.steps=20:23 --set profile.stacks=true shows it"
    )
    return Finding("script", fact, evidence, advice, gain) if run.worth(gain) else None
