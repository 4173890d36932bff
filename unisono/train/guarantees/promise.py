"""The promise of a run, and the entries of result.json."""

from __future__ import annotations

import time
from math import isfinite
from typing import Any

import numpy as np
import torch

from unisono.data.loader_workers import deaths
from unisono.exchange.base import PROMISES
from unisono.exchange.choose import promise_of
from unisono.parallel.compiler_determinism import order_dependent
from unisono.parallel.parallelize import promise_of_parallel
from unisono.train.context import RunContext
from unisono.train.guarantees.user_errors import is_elementwise
from unisono.train.optimization.sharded_step import differs_in_shards
from unisono.train.recovery.survival import may_survive, survival_of
from unisono.train.state.run_progress import Progress


def plain(value: Any) -> Any:
    """Return a number of torch or numpy as one of Python's own."""
    number = isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    return value.item() if number else value


OTHERWISE = "; from step "


def promise(context: RunContext) -> tuple[str, str]:
    """Return what is promised of a run's result, and why. A resume cannot promise more than what it continues."""
    progress, resumed = context.progress, context.state.resumed
    by_loop = context.loop.promise(context)
    if by_loop is not None and not progress.changes:
        return by_loop
    here = _promise_here(context)
    before, why = resumed.about.get("promise", here) if resumed is not None else here
    if progress.changes:
        what = ", ".join(f"{c['field']} from {c['from']} to {c['to']}" for c in progress.changes)
        first = min(c["step"] for c in progress.changes)
        if before.startswith(PROMISES[0]):  # or "exact until" such a step already
            return f"{before.partition(' until ')[0]} until step {first}", f"then other mathematics: {what}"
        why, _, _ = why.partition(OTHERWISE)  # without the text of earlier changes, which are among these
        return before, f"{why}{OTHERWISE}{first} on other mathematics: {what}"
    return max(here, (before, why), key=lambda promised: _rank(promised[0]))


def _rank(promise: str) -> int:
    """Return how little a promise binds; an exchange of the script's own may promise anything."""
    return PROMISES.index(promise) if promise in PROMISES else len(PROMISES)


def _promise_here(context: RunContext) -> tuple[str, str]:
    """Return the promise of these processes and its reason, whatever the run promised before."""
    progress, models, settings = context.progress, context.models, context.settings
    if progress.differences:
        return "tolerance", "; ".join(progress.differences)
    if opaque := models.buffers.attributes.opaque:
        return "tolerance", "; ".join(opaque)
    if why := order_dependent or _benchmarks(context.device):
        return "tolerance", "; ".join(why)
    if progress.broken_promise:
        return "tolerance", progress.broken_promise
    exchange = progress.exchange or promise_of(settings, context.group.size)
    has_parts = context.mesh.axes.shard > 1 or context.mesh.axes.tensor > 1
    if has_parts and (reason := _promise_of_shards(context)):
        return max((exchange[0], "tolerance"), key=_rank), reason
    if ties := models.ties:
        reason = f"{ties} belongs to several stages and is added up once a step, so a whole model agrees to rounding"
        exchange = exchange[0], f"{exchange[1]}; {reason}"
    return promise_of_parallel(exchange, settings.parallel, context.mesh.axes, models.plans)


def _promise_of_shards(context: RunContext) -> str:
    """Return why steps with parts of parameters have other bits than steps with whole ones; "": they have the same."""
    steppers = context.progress.steppers
    strange = [type(s).__name__ for s in steppers if hasattr(s, "param_groups") and not is_elementwise(s)]
    if strange:
        return f"{strange[0]} may compute with whole tensors, of which each process has a part"
    rounds = [type(s).__name__ for s in steppers if differs_in_shards(s, context.models.layers)]
    if rounds:
        return (
            f"{rounds[0]} rounds the last elements of a tensor otherwise, and each process has a part: use float32 "
            "parameters and fused=False"
        )
    return ""


def _benchmarks(device: torch.device) -> list[str]:
    """Return why a library chooses kernels by measuring; []: it does not."""
    on = device.type == "cuda" and torch.backends.cudnn.benchmark
    return ["torch.backends.cudnn.benchmark chooses convolutions by how long they take"] if on else []


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
    logged = {name: value for name, value in progress.results.items() if isinstance(value, (int, float, str, bool))}
    return {  # a value that the loop logged by the name of an entry ("loss", by an evaluation) gets another name
        **{f"logged_{name}" if name in known else name: v for name, v in logged.items() if v != known.get(name)},
        **known,
    }


def _bytes_per_step(progress: Progress) -> dict[str, int]:
    """Return the bytes of gradients that left this process in a step; {}: they are not counted."""
    steps = progress.steps_done - progress.resumed_at
    if progress.order is None or not steps or not isfinite(progress.bytes_sent):
        return {}
    sent, plain_bytes = round(progress.bytes_sent / steps), round(progress.bytes_uncompressed / steps)
    return {"bytes_per_step": sent, **({"bytes_uncompressed": plain_bytes} if plain_bytes != sent else {})}
