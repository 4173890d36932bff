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

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from unisono.checkpoint import emergency_dump
from unisono.errors import CheckpointError
from unisono.train.recovery.snapshot import FlatTensors, FlatTensorSpec, Snapshot

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
    tensors: dict[str, torch.Tensor] = {}
    mine, theirs = _written(buddy.mine, tensors), _written(buddy.theirs, tensors)
    if mine or theirs:
        try:
            emergency_dump.write(
                run.dir, run.rank, max(each["step"] for each in (*mine, *theirs)), tensors, [mine, theirs]
            )
        except (OSError, SafetensorError) as full:
            run.print(f"What buddies have kept cannot be left behind: {full}")


def load_dump(run: Run[Any], buddy: ShardReplica) -> None:
    """Before the loop: go on from what was left behind, if that is further than what the run goes on from. All
    processes call it."""
    if not hands_off(run):
        return
    device = run.device
    if (found := emergency_dump.read_dump(run.dir, run.rank)) is not None:
        tensors, (mine, theirs) = found
        buddy.mine, buddy.theirs = _read(mine, tensors, device), _read(theirs, tensors, device)
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


def _written(parcels: Sequence[Snapshot | None], tensors: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    """These parcels as JSON; their bytes go into `tensors`, once, whoever shares them."""
    told = []
    for parcel in parcels:
        if parcel is not None:
            bags = [_put(bag, tensors) for bag in (parcel.still, parcel.moving)]
            told.append({"step": parcel.step, "bags": bags, "names": list(parcel.names), "plain": parcel.plain})
    return told


def _put(bag: FlatTensors, tensors: dict[str, torch.Tensor]) -> list[Any]:
    name = f"bag-{bag.data.data_ptr():x}-{len(bag.data)}"
    tensors[name] = bag.data.cpu()
    return [name, bag.abouts]


def _read(told: Sequence[Any], tensors: dict[str, torch.Tensor], device: torch.device) -> list[Snapshot | None]:
    """The same parcels again."""
    parcels: list[Snapshot | None] = []
    for each in told:
        still, moving = (
            FlatTensors([FlatTensorSpec(*a) for a in abouts], tensors[name].to(device)) for name, abouts in each["bags"]
        )
        parcels.append(Snapshot(each["step"], still, moving, each["names"], each["plain"]))
    return [*parcels, None, None][:2]
