"""A run with buddies that begins again after a death loses no step: those who fail because of it leave what they have.

    process 0   shard 0, copy of 2   leaves both --.                      process 0   shard 0
    process 1   shard 1, killed                    |--  begin again  -->  process 1   shard 1, from process 2
    process 2   shard 2, copy of 1   leaves both --'                      process 2   shard 2

Whoever fails because another one has died writes its parcels and its neighbour's (train/recovery/shard_replica.py) into
the run's directory, of all steps of which it has them. The launcher otherwise ends a broken run within half a second;
here it waits. When all begin again, each takes what the process in its place has left, and `ShardReplica.restore` does
the rest: the newest step that is whole everywhere. Where there is none, as when two neighbours are gone, the checkpoint
is the way.
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
    """Does this process leave what it has, should another one die? Somebody must be there to begin again. (With one
    virtual rank a step's random numbers go on from the last one's, and buddies have none.)"""
    settings = context.settings
    return settings.parallel.replicate_shards and settings.virtual_ranks > 1 and context.group.monitor is not None


def dump_replicas(context: RunContext, replica: ShardReplica, error: Exception) -> None:
    """This process fails with `error`. If that is the death of another process, write what this one has."""
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
            context.monitor.note(f"What buddies have kept cannot be left behind: {full}")


def load_dump(context: RunContext, replica: ShardReplica) -> None:
    """Before the loop: continue from what processes have left behind, if that is further than what the run continues
    from. All processes call this."""
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
        note(f"What was left behind is not enough: {error.problems[0].true}")
        newest = -1
    if newest > progress.steps_done:
        progress.steps_done = progress.resumed_at = replica.restore(lost)
        note(f"going on after step {newest}, from what the processes have left behind")
    else:
        replica.mine, replica.theirs = [None, None], [None, None]


def _snapshot_of(decoded: Any) -> Snapshot | None:
    """Return the snapshot that was decoded as a tuple."""
    return None if decoded is None else Snapshot.of(*decoded)
