"""The result of a run: the entries of result.json."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from math import isfinite
from typing import Any

import numpy as np
import torch

from unisono.data.loader_workers import deaths
from unisono.train.context import RunContext
from unisono.train.guarantees.promise import promise
from unisono.train.recovery.survival import may_survive, survival_of
from unisono.train.state.run_progress import Progress

LONGEST_TEXT = 1000
"""Characters of a logged text. run.log_text records a longer one."""
RESERVED = frozenset(
    {
        *("loss", "steps", "resumed_at", "samples", "seconds", "samples_per_second", "ranks", "virtual_ranks"),
        *("promise", "reason", "verified_steps", "survival", "weights_sha256", "stopped", "phases", "skipped"),
        *("bytes_per_step", "bytes_uncompressed", "bytes_sent", "bytes_received", "bytes_source"),
        *("device", "energy", "cuda_graphs", "deaths", "joined", "worker_restarts", "assignments", "claimed_steps"),
        *("noise_scale", "plan"),
        *("audit", "audits", "sites", "servers", "lost_workers", "late_mean", "late_most"),
        *("handed_out_again", "dropped_gradients"),
    }
)
"""Names of entries of result.json, also of those that a run does not have."""


def plain(value: Any) -> Any:
    """Return a number of torch or numpy as one of Python's own.

    An integer that no float holds becomes infinity, and a long text is shortened.
    """
    number = isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    value = value.item() if number else value
    if isinstance(value, int) and abs(value) > sys.float_info.max:  # readers take numbers as float
        value = math.inf if value > 0 else -math.inf
    if isinstance(value, str) and len(value) > LONGEST_TEXT:
        value = f"{value[: LONGEST_TEXT - 1]}…"
    return value


def as_entry(value: Any) -> Any:
    """Return a plain value for the timeline and the progress line: a list or a dictionary as text."""
    return plain(str(value)) if isinstance(value, list | tuple | dict | set) else value


def result(context: RunContext) -> dict[str, Any]:
    """Return what goes into result.json."""
    progress, settings = context.progress, context.settings
    seconds = 0.0 if progress.began is None else (progress.ended or time.perf_counter()) - progress.began
    promised, reason = promise(context)
    order, done = progress.order, progress.done
    survives = order is not None and progress.exchange is None and may_survive(context)
    known = {
        **({"loss": done.loss if isfinite(done.loss) else None} if done is not None else {}),
        **({"skipped": context.scale.skipped} if context.scale.on else {}),
        "steps": progress.steps_done,
        **({"resumed_at": progress.resumed_at} if progress.resumed_at else {}),
        "samples": order.samples(progress.steps_done) if order else 0,
        "seconds": round(seconds, 3),
        "samples_per_second": round(progress.samples_here / seconds, 2) if seconds else 0.0,
        **_bytes_per_step(progress),
        "ranks": context.group.size,
        "virtual_ranks": settings.virtual_ranks,
        "promise": promised,
        "reason": reason,
        "survival": survival_of(settings.parallel, context.mesh.axes, survivors=survives),
        "weights_sha256": context.state.fingerprint() if context.state.models else None,
        "stopped": order is not None and progress.steps_done < progress.last,
        **({"worker_restarts": deaths.restarts} if deaths.restarts else {}),
        **{name: value for more in context.hooks.result for name, value in more().items()},
        "phases": {name: round(s, 3) for name, s in context.monitor.clock.seconds.items()},
    }
    known |= context.loop.result()
    logged = {name: _json(v) for name, v in progress.results.items() if isinstance(v, (int, float, str, bool))}
    return with_logged(known, logged)


def with_logged(known: Mapping[str, Any], logged: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a run together with the values that its loop logged.

    A value by the name of an entry ("loss", by an evaluation) becomes `logged_NAME`, unless it is that of the entry.
    """
    taken = RESERVED | known.keys()
    others = {name: value for name, value in logged.items() if name not in known or value != known[name]}
    return {**{f"logged_{name}" if name in taken else name: value for name, value in others.items()}, **known}


def _json(value: float | str) -> float | str | None:
    """Return a value for JSON, which has no NaN and no infinity."""
    return None if isinstance(value, float) and not isfinite(value) else value


def _bytes_per_step(progress: Progress) -> dict[str, int]:
    """Return the bytes of gradients that left this process in a step; {}: they are not counted."""
    steps = progress.steps_done - progress.resumed_at
    if progress.order is None or not steps or not isfinite(progress.bytes_sent):
        return {}
    sent, plain_bytes = round(progress.bytes_sent / steps), round(progress.bytes_uncompressed / steps)
    return {"bytes_per_step": sent, **({"bytes_uncompressed": plain_bytes} if plain_bytes != sent else {})}
