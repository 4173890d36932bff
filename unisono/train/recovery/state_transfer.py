"""Send the state of the run to a process that replaces a dead one. The replacement reads no file.

    rank 0   model 0, shard 0 --------------------.
    rank 1   model 0, shard 1 ----------------.   |
    rank 2   new: placed shard 0 of some model |  '-->  shard 0, its optimizer's state, the numbers of the run
    rank 3   new: placed shard 1               '----->  shard 1, ...

Whole models are sent in the form that a checkpoint has. If several processes share a model, each one sends a snapshot
of its part (train/recovery/snapshot.py) to the processes with the same place in the mesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from unisono.checkpoint.load import Checkpoint
from unisono.config import ENVIRONMENT
from unisono.distributed.membership.membership import Membership
from unisono.distributed.process_group import Message, wait_for
from unisono.errors import PeerLostError, WorldError
from unisono.tensors.codec import TensorTable, decode, encode, specs_of
from unisono.tensors.flat import FlatTensors
from unisono.tensors.spec import as_bytes
from unisono.train.context import RunContext
from unisono.train.guarantees.run_identity import RUN
from unisono.train.recovery.snapshot import Snapshot, live_state, restore


def send_state(
    context: RunContext, membership: Membership, empty: Sequence[bool], mine: Mapping[str, Any]
) -> Mapping[str, Any] | None:
    """Send the state of the run to processes that have just joined. All processes call this together.

    Args:
        context: the context of the run.
        membership: the membership of this process in the run.
        empty: for each process, whether it has just joined.
        mine: additional values for the processes that join, as JSON.

    Returns:
        The values `mine` of the sender, on a process that has just joined; None on the others.
    """
    group, unit = context.group, context.mesh.unit
    known = [next((r for r in range(slot, group.size, unit) if not empty[r]), None) for slot in range(unit)]
    if None in known:
        raise PeerLostError(
            f"Process {membership.number} cannot join the run.",
            "All processes that had the state are gone.",
            "continue from the newest checkpoint: the same command with --resume.",
        )
    sent, about = list[torch.Tensor](), None
    if group.rank in known:
        about, sent = _packed(context, mine)
    abouts = group.all_gather_object(about)
    new = [rank for rank, is_new in enumerate(empty) if is_new and rank % unit == group.rank % unit]
    received = None
    if group.rank in known:
        for portion in _portions(sent):
            pieces = [piece.to(group.comm_device) for piece in portion]
            wait_for(group.send_and_receive([Message(piece, rank) for rank in new for piece in pieces], []))
    elif empty[group.rank]:
        source = known[group.rank % unit]
        assert source is not None
        received = abouts[source]
        _refuse_another_machine(context, membership, received["machine"])
        where = torch.device("cpu") if context.mesh.device_mesh is None else context.device
        room = {name: spec.empty(where) for name, spec in specs_of(received["state"]).items()}
        for portion in _portions(room.values()):
            pieces = [piece.to(group.comm_device) for piece in portion]  # no copy if they are on that device already
            wait_for(group.send_and_receive([], [Message(piece, source) for piece in pieces]))
            for into, piece in zip(portion, pieces, strict=True):
                into.copy_(piece)
        _load(context, decode(received["state"], room), received["steps"])
        _apply(context, received)
    group.barrier()
    return None if received is None else received["more"]


def _packed(context: RunContext, more: Mapping[str, Any]) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Return the state that a resume needs: its numbers and strings, and its tensors."""
    progress, tensors = context.progress, TensorTable()
    about = {
        "state": encode(_state_of(context), "state", tensors),
        "steps": progress.steps_done,
        "columns": context.step_sync.names,
        "saved_after": context.state.saved_after,
        "same_after": progress.same_after,
        "machine": {name: context.identity.get(name) for name in ENVIRONMENT},
        "run": context.identity.get(RUN),
        "changes": progress.changes,
        "differences": progress.differences,
        "more": more,
    }
    return about, list(tensors.values())


def _apply(context: RunContext, about: Mapping[str, Any]) -> None:
    progress = context.progress
    progress.steps_done, progress.same_after = about["steps"], about["same_after"]
    context.step_sync.names, context.state.saved_after = about["columns"], about["saved_after"]
    progress.changes[:], progress.differences[:] = about["changes"], about["differences"]
    context.identity["device"] = about["machine"]["device"]  # until now: this process's alone
    context.identity[RUN] = about["run"]


def _refuse_another_machine(context: RunContext, membership: Membership, theirs: Mapping[str, Any]) -> None:
    fixed = [name for name in ENVIRONMENT if not (name == "device" and context.group.mixed)]
    if differ := [name for name in fixed if theirs.get(name) != context.identity.get(name)]:
        raise WorldError(
            f"Process {membership.number} cannot join the run from another kind of machine.",
            f"Its machine differs in {', '.join(differ)}, which changes bits.",
            "replace processes on machines of the same kind.",
        )


def _state_of(context: RunContext) -> Any:
    """Return the state of all tracked objects: by name, or as a snapshot of this process's part of a shared model."""
    if context.mesh.device_mesh is None:
        return {name: thing.state_dict() for name, thing in context.state.tracked.items()}
    context.models.reshard()
    live = live_state(context.state.tracked)
    still, moving = (FlatTensors.copy_of(tensors, context.device) for tensors in (live.still, live.moving))
    return Snapshot(context.progress.steps_done, still, moving, live.names, live.plain)


def _load(context: RunContext, state: Any, steps: int) -> None:
    """Load a decoded state."""
    if context.mesh.device_mesh is None:
        context.state.take(Checkpoint(Path("the memory of a survivor"), steps, {}, state))
    else:
        restore(Snapshot.of(*state), context.state.tracked, context.device)


PORTION_BYTES = 1 << 28
"""Largest part of a state in CPU memory that is on the device at once. The model is on the device already."""


def _portions(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield all bytes of these tensors, in pieces that are small enough to be sent at once."""
    portion, held = list[torch.Tensor](), 0
    for piece in (piece for tensor in tensors for piece in as_bytes(tensor).split(PORTION_BYTES)):
        if portion and held + len(piece) > PORTION_BYTES:
            yield portion
            portion, held = [], 0
        portion.append(piece)
        held += len(piece)
    yield portion
