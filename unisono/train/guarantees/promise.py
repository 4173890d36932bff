"""The promise of a run: how far its result depends on the placement, and why."""

from __future__ import annotations

import torch

from unisono.exchange.base import PROMISES
from unisono.exchange.choose import promise_of
from unisono.parallel.compiler_determinism import order_dependent
from unisono.parallel.parallelize import promise_of_parallel
from unisono.train.context import RunContext
from unisono.train.guarantees.deterministic_kernels import unrepeatable
from unisono.train.guarantees.user_errors import is_elementwise
from unisono.train.optimization.sharded_step import differs_in_shards

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
            return f"{before.partition(' until ')[0]} until step {first}", f"then other computations: {what}"
        why, _, _ = why.partition(OTHERWISE)  # without the text of earlier changes, which are among these
        return before, f"{why}{OTHERWISE}{first} on other computations: {what}"
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
    if why := order_dependent or unrepeatable or _benchmarks(context.device):
        return "tolerance", "; ".join(why)
    if settings.speed.float8 in ("tensorwise", "rowwise") and context.mesh.axes.shard > 1:
        return "tolerance", f"speed.float8={settings.speed.float8}: shards in float8 were not tested on GPUs"
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
