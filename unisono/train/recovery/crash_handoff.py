"""Dump replicas of shards when a process fails, so that a restarted run loses no step.

    process 0   shard 0, copy of 2   dumps both ---.                      process 0   shard 0
    process 1   shard 1, killed                    |--   restart     -->  process 1   shard 1, from process 2
    process 2   shard 2, copy of 1   dumps both ---'                      process 2   shard 2

A process that fails because another process has died writes two kinds of snapshots into the run's directory: its own
and its neighbor's (shard_replica.py). It writes the snapshots of all steps that it holds. The launcher usually ends a
broken run within half a second; in this case it waits. After the restart, each process reads the dump of its rank, and
`ShardReplica.restore` continues from the newest step that is complete on all processes. If there is no such step, for
example because two neighbors were lost, the run continues from the checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from unisono.checkpoint import emergency_dump
from unisono.errors import CheckpointError
from unisono.tensors.codec import TensorTable, decode, encode
from unisono.train.recovery.snapshot import Snapshot

if TYPE_CHECKING:
    from unisono.train.context import RunContext
    from unisono.train.recovery.shard_replica import ShardReplica


def hands_off(context: RunContext) -> bool:
    """Return whether this process dumps its replicas if another one dies. It needs a launcher that restarts the run.

    With one virtual rank, random numbers continue from step to step, and replicas do not hold generators. Dumps are not
    signed, so there are none if only signed states may be loaded.
    """
    settings = context.settings
    if settings.secure.trust:
        return False
    return settings.parallel.replicate_shards and settings.virtual_ranks > 1 and context.group.monitor is not None


def dump_replicas(context: RunContext, replica: ShardReplica, error: Exception) -> None:
    """Write the replicas of this process if `error`, with which it fails, is the death of another process."""
    monitor = context.group.monitor
    if monitor is None or not hands_off(context) or not monitor.is_peer_loss(error):
        return
    steps = [snapshot.step for snapshot in (*replica.mine, *replica.theirs) if snapshot is not None]
    if steps:
        tensors = TensorTable()
        plain = encode([replica.mine, replica.theirs], "replica", tensors)
        try:
            emergency_dump.write(context.run_dir, context.group.rank, max(steps), tensors, plain)
        except (OSError, SafetensorError) as full:
            context.monitor.note(f"cannot write the copies of shards for a restart: {full}")


def load_dump(context: RunContext, replica: ShardReplica) -> None:
    """Continue from dumped replicas that are newer than the checkpoint, before the loop. All processes call this."""
    if not hands_off(context):
        return
    group, progress, note = context.group, context.progress, context.monitor.note
    if (found := emergency_dump.read_dump(context.run_dir, group.rank)) is not None:
        tensors, plain = found
        mine, theirs = decode(plain, {name: tensor.to(group.device) for name, tensor in tensors.items()})
        replica.mine, replica.theirs = [*map(_snapshot_of, mine)], [*map(_snapshot_of, theirs)]
    lost = [rank for rank, has in enumerate(group.all_gather_object(found is not None)) if not has]
    if len(lost) == group.size:
        return
    try:
        newest = replica.newest(lost)
    except CheckpointError as error:
        note(f"The emergency dumps are not enough: {error.problems[0].facts}")
        newest = -1
    if newest > progress.steps_done:
        progress.steps_done = progress.resumed_at = replica.restore(lost)
        note(f"continuing after step {newest}, from the emergency dumps of the processes")
    else:
        replica.mine, replica.theirs = [None, None], [None, None]


def _snapshot_of(decoded: Any) -> Snapshot | None:
    """Return the snapshot that was decoded as a tuple."""
    return None if decoded is None else Snapshot.of(*decoded)
