"""Which state is lost with a process that dies, and whether the others continue without it."""

from __future__ import annotations

from unisono.config import ParallelSettings
from unisono.config.mesh_shape import MeshShape
from unisono.exchange.choose import survives
from unisono.train.context import RunContext


def may_survive(context: RunContext) -> bool:
    """Return whether the settings let the other processes continue without one that dies.

    They cannot continue in any of these cases:

    - Steps are compared with results that processes computed before (audit_every).
    - No other replica of a divided model exists.
    - Copies of shards belong to the group that is gone.
    - torch assembles a divided model with collectives that a process could not leave on an accelerator.
    """
    settings, axes, monitor = context.settings, context.mesh.axes, context.group.monitor
    if monitor is None:
        return False
    replicas = (
        axes.replicate > 1 and axes.replicate * axes.shard == axes.size and not settings.parallel.replicate_shards
    )
    is_whole = context.mesh.device_mesh is None
    is_plain = context.loop.is_uniform and context.inspection is None and not settings.audit_every
    survivable = is_plain and (is_whole or (replicas and not monitor.async_errors))
    return survivable and settings.virtual_ranks > 1 and survives(settings)


def survival_of(parallel: ParallelSettings, axes: MeshShape, *, survivors: bool = False) -> str:
    """Return where the state of a lost process still exists, for result.json.

    survivors    the other processes have whole models, and continue without a restart (step_recovery.py)
    replicas     other processes have it, but the run restarts without the lost process
    buddy        another process on the axis has it, and dumps it for the restarted run (crash_handoff.py)
    checkpoint   no process has its state after the last step
    """
    if survivors and axes.replicate > 1:
        return "survivors"
    others = ["replicas"] * (axes.replicate > 1 or axes.context > 1) + ["buddy"] * parallel.replicate_shards
    return " and ".join(others) or "checkpoint"


def about_shards(parallel: ParallelSettings, axes: MeshShape) -> str:
    """Return a line about the copies of shards, for the first lines of a run, or "" for the usual case."""
    if parallel.replicate_shards:
        return "shards: each has a copy on another process"
    if axes.shard > 1 and survival_of(parallel, axes) == "checkpoint":
        return "shards: no copies but the checkpoint's (--set parallel.replicate_shards=true keeps one of each)"
    return ""
