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
    from unisono.train.recovery.shard_replica import ShardReplica
    from unisono.train.run import Run


def hands_off(run: Run[Any]) -> bool:
    """Does this process leave what it has, should another one die? Somebody must be there to begin again. (With one
    virtual rank a step's random numbers go on from the last one's, and buddies have none.)"""
    return run.settings.parallel.replicate_shards and run.settings.virtual_ranks > 1 and run._group.company is not None


def dump_replicas(run: Run[Any], error: Exception) -> None:
    """This process fails with `error`. If that tells of another one's death, it leaves what it has."""
    buddy, company = run._engine.buddy if run._engine is not None else None, run._group.company
    if buddy is None or company is None or not hands_off(run) or not company.is_peer_loss(error):
        return
    steps = [snapshot.step for snapshot in (*buddy.mine, *buddy.theirs) if snapshot is not None]
    if steps:
        tensors = TensorTable()
        plain = encode([buddy.mine, buddy.theirs], "replica", tensors)
        try:
            emergency_dump.write(run.dir, run.rank, max(steps), tensors, plain)
        except (OSError, SafetensorError) as full:
            run.print(f"What buddies have kept cannot be left behind: {full}")


def load_dump(run: Run[Any], buddy: ShardReplica) -> None:
    """Before the loop: go on from what was left behind, if that is further than what the run goes on from. All
    processes call it."""
    if not hands_off(run):
        return
    device = run.device
    if (found := emergency_dump.read_dump(run.dir, run.rank)) is not None:
        tensors, plain = found
        mine, theirs = decode(plain, {name: tensor.to(device) for name, tensor in tensors.items()})
        buddy.mine, buddy.theirs = [*map(_snapshot_of, mine)], [*map(_snapshot_of, theirs)]
    lost = [rank for rank, has in enumerate(run._group.all_gather_object(found is not None)) if not has]
    if len(lost) == run.size:
        return
    try:
        newest = buddy.newest(lost)
    except CheckpointError as error:
        run.print(f"What was left behind is not enough: {error.problems[0].true}")
        newest = -1
    if newest > run.steps_done:
        run.steps_done = run._resumed_at = buddy.restore(lost)
        run.print(f"going on after step {newest}, from what the processes have left behind")
    else:
        buddy.mine, buddy.theirs = [None, None], [None, None]


def _snapshot_of(decoded: Any) -> Snapshot | None:
    """Return the snapshot that was decoded as a tuple."""
    return None if decoded is None else Snapshot.of(*decoded)
