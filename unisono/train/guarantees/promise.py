"""What a run says of itself when it is over."""

from __future__ import annotations

import time
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from unisono.data.loader_workers import deaths
from unisono.exchange.base import PROMISES
from unisono.exchange.choose import promise_of
from unisono.parallel.compiler_determinism import order_dependent
from unisono.parallel.parallelize import promise_of_parallel
from unisono.train.guarantees.user_errors import is_elementwise
from unisono.train.optimization.sharded_step import differs_in_shards
from unisono.train.recovery.shard_replica import survival_of

if TYPE_CHECKING:
    from unisono.train.recovery.step_recovery import StepRecovery
    from unisono.train.run import Run


def plain(value: Any) -> Any:
    """What a loop logs: a number of torch's or numpy's as Python's own."""
    number = isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    return value.item() if number else value


OTHERWISE = "; from step "


def promise(run: Run[Any]) -> tuple[str, str]:
    """What is promised of this run's result, and why. A resume cannot promise more than what it goes on from."""
    here = _promise_here(run)
    resumed = run._state.resumed
    before, why = resumed.about.get("promise", here) if resumed is not None else here
    if run.changes:
        what = ", ".join(f"{c['field']} from {c['from']} to {c['to']}" for c in run.changes)
        first = min(c["step"] for c in run.changes)
        if before.startswith(PROMISES[0]):  # or "exact until" such a step already
            return f"{before.partition(' until ')[0]} until step {first}", f"then other mathematics: {what}"
        why, _, _ = why.partition(OTHERWISE)  # said of earlier changes, which are among these
        return before, f"{why}{OTHERWISE}{first} on other mathematics: {what}"
    return max(here, (before, why), key=lambda promised: _rank(promised[0]))


def _rank(promise: str) -> int:
    """How little a promise binds; a placement of somebody's own may say anything."""
    return PROMISES.index(promise) if promise in PROMISES else len(PROMISES)


def _promise_here(run: Run[Any]) -> tuple[str, str]:
    """What these processes can promise, whatever was before."""
    if run.differences:
        return "tolerance", "; ".join(run.differences)
    if opaque := run._models.buffers.attributes.opaque:
        return "tolerance", "; ".join(opaque)
    if why := order_dependent or _benchmarks(run.device):
        return "tolerance", "; ".join(why)
    if run._engine is not None and run._engine.verification.broken:
        return "tolerance", run._engine.verification.broken
    exchange = promise_of(run.settings, run.size)
    own = run._engine.own if run._engine is not None else None
    if own is not None:
        exchange = own.promise, own.reason
    if run._mesh.axes.shard > 1 or run._mesh.axes.tensor > 1:
        steppers = run._engine.steppers if run._engine is not None else ()
        strange = [type(s).__name__ for s in steppers if hasattr(s, "param_groups") and not is_elementwise(s)]
        if strange:
            reason = f"{strange[0]} may compute with whole tensors, of which each process has a part"
            return max((exchange[0], "tolerance"), key=_rank), reason
        rounds = [type(s).__name__ for s in steppers if differs_in_shards(s, run._models.layers)]
        if rounds:
            reason = (
                f"{rounds[0]} rounds the last elements of a tensor otherwise, and each process has a part: use float32 "
                "parameters and fused=False"
            )
            return max((exchange[0], "tolerance"), key=_rank), reason
    ties = run._models.ties
    if ties:
        reason = f"{ties} belongs to several stages and is added up once a step, so a whole model agrees to rounding"
        exchange = exchange[0], f"{exchange[1]}; {reason}"
    return promise_of_parallel(exchange, run.settings.parallel, run._mesh.axes, run._models.plans)


def _benchmarks(device: torch.device) -> list[str]:
    """Does a library choose kernels by measuring, in words?"""
    on = device.type == "cuda" and torch.backends.cudnn.benchmark
    return ["torch.backends.cudnn.benchmark chooses convolutions by how long they take"] if on else []


def result(run: Run[Any]) -> dict[str, Any]:
    """What goes into result.json."""
    seconds = 0.0 if run._began is None else (run._ended or time.perf_counter()) - run._began
    promised_here, reason = promise(run)
    order = run._engine.order if run._engine else None
    known = {
        **({"loss": run._done.loss if isfinite(run._done.loss) else None} if run._done is not None else {}),
        **({"skipped": run._scale.skipped} if run._scale.on else {}),
        "steps": run.steps_done,
        **({"resumed_at": run._resumed_at} if run._resumed_at else {}),
        "samples": order.samples(run.steps_done) if order else 0,
        "seconds": round(seconds, 3),
        "samples_per_second": round(run._samples_here / seconds, 2) if seconds else 0.0,
        **_sent(run),
        "ranks": run.size,
        "virtual_ranks": run.settings.virtual_ranks,
        **run._sites.told,
        "promise": promised_here,
        "reason": reason,
        "survival": survival_of(run.settings.parallel, run._mesh.axes, survivors=_survivors(run) is not None),
        "weights_sha256": run._state.fingerprint() if run._state.models else None,
        "stopped": order is not None and run._engine is not None and run.steps_done < run._engine.last,
        **_deaths(run),
        **({"worker_restarts": deaths.restarts} if deaths.restarts else {}),
        **({"deals": deals} if (deals := _deals(run)) else {}),
        **_claimed(run),
        **({"audits": len(audit.done)} if run._engine is not None and (audit := run._engine.audit) is not None else {}),
        **_verified(run),
        "phases": {name: round(s, 3) for name, s in run._watcher.clock.seconds.items()},
    }
    logged = {name: value for name, value in run.results.items() if isinstance(value, (int, float, str, bool))}
    return {  # what the loop logged under a name of ours ("loss", by an evaluation) has another value and name
        **{f"logged_{name}" if name in known else name: v for name, v in logged.items() if v != known.get(name)},
        **known,
    }


def _survivors(run: Run[Any]) -> StepRecovery | None:
    return run._engine.survivors if run._engine is not None else None


def _deaths(run: Run[Any]) -> dict[str, Any]:
    """Which processes have died, and which have joined, with the steps that were done then; {}: none."""
    survivors = _survivors(run)
    told = {"deaths": survivors.deaths, "joined": survivors.joined} if survivors is not None else {}
    return {name: value for name, value in told.items() if value}


def _deals(run: Run[Any]) -> list[dict[str, Any]]:
    """When virtual ranks were dealt anew because of how fast the processes are."""
    dealing = run._engine.dealing if run._engine is not None else None
    return [{"step": first, "virtual_ranks": counts} for first, counts in (dealing.deals if dealing else ())]


def _verified(run: Run[Any]) -> dict[str, int]:
    """Return in how many steps the run checked its promise; {} where it does not check it."""
    steps = run._engine.verification.steps if run._engine is not None else None
    return {} if steps is None else {"verified_steps": steps}


def _claimed(run: Run[Any]) -> dict[str, int]:
    """In how many steps the last virtual ranks went to whoever was free: in the others it did not pay."""
    dealing = run._engine.dealing if run._engine is not None else None
    return {"claimed_steps": dealing.claims.steps} if dealing is not None and dealing.claims is not None else {}


def _sent(run: Run[Any]) -> dict[str, int]:
    """Bytes of gradients that have left this process for others, a step; {}: nobody has counted them."""
    steps = run.steps_done - run._resumed_at
    if run._engine is None or not steps or not isfinite(run._engine.sent):
        return {}
    sent, plain = round(run._engine.sent / steps), round(run._engine.plain / steps)
    return {"bytes_per_step": sent, **({"bytes_uncompressed": plain} if plain != sent else {})}
