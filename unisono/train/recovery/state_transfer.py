"""A process that has come in place of one that died is given what a resume needs, by one that has it. No file is read.

    rank 0   model 0, shard 0 --------------------.
    rank 1   model 0, shard 1 ----------------.   |
    rank 2   new: placed shard 0 of some model |  '-->  shard 0, its optimizer's state, the numbers of the run
    rank 3   new: placed shard 1               '----->  shard 1, ...

Whole models travel as a checkpoint would hold them; of a model that several processes share each sends its part, as
buddies do (train/recovery/snapshot.py), to whoever sits in the same place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from unisono.checkpoint.load import Checkpoint
from unisono.config import ENVIRONMENT
from unisono.distributed.process_group import Message, wait_for
from unisono.errors import PeerLostError, WorldError
from unisono.tensors.codec import TensorTable, decode, encode, specs_of
from unisono.tensors.flat import FlatTensors
from unisono.tensors.spec import as_bytes
from unisono.train.recovery.snapshot import Snapshot, live_state, restore

if TYPE_CHECKING:
    from unisono.train.recovery.step_recovery import StepRecovery
    from unisono.train.run import Run


def send_state(survivors: StepRecovery, empty: Sequence[bool]) -> None:
    """Those who are `empty` (of each process: has it just come?) are given all that they need. Everybody calls it."""
    group, company, unit = survivors.group, survivors.company, survivors.run._mesh.unit
    known = [next((r for r in range(seat, group.size, unit) if not empty[r]), None) for seat in range(unit)]
    if None in known:
        raise PeerLostError(
            f"Process {company.number} was to join a run.",
            "All processes that knew its state are gone.",
            "go on from the newest checkpoint: the same command with --resume.",
        )
    mine, about = list[torch.Tensor](), None
    if group.rank in known:
        about, mine = _given(survivors)
    told = group.all_gather_object(about)
    new = [rank for rank, is_new in enumerate(empty) if is_new and rank % unit == group.rank % unit]
    if group.rank in known:
        for portion in _portions(mine):
            gifts = [piece.to(group.wire) for piece in portion]
            wait_for(group.send_and_receive([Message(piece, rank) for rank in new for piece in gifts], []))
    elif empty[group.rank]:
        source = known[group.rank % unit]
        assert source is not None
        about = told[source]
        _refuse_another_machine(survivors, about["machine"])
        where = torch.device("cpu") if survivors.run._mesh.torchs is None else survivors.run.device
        room = {name: spec.empty(where) for name, spec in specs_of(about["state"]).items()}
        for portion in _portions(room.values()):
            come = [piece.to(group.wire) for piece in portion]  # the very same, if it lies there
            wait_for(group.send_and_receive([], [Message(piece, source) for piece in come]))
            for into, piece in zip(portion, come, strict=True):
                into.copy_(piece)
        _load(survivors.run, decode(about["state"], room), about["steps"])
        _take(survivors, about)
    group.barrier()


def _given(survivors: StepRecovery) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """All that a resume needs: the numbers and words of it, and the tensors."""
    run, watch = survivors.run, survivors.watch
    tensors = TensorTable()
    about = {
        "state": encode(_state_of(run), "state", tensors),
        "steps": run.steps_done,
        "meetings": survivors.meetings,
        "columns": run._table.names,
        "saved_after": run._state.saved_after,
        "same_after": watch.same_after if watch is not None else 0,
        "machine": {name: run._identity.get(name) for name in ENVIRONMENT},
        "changes": run.changes,
        "differences": run.differences,
        "deaths": [survivors.deaths, survivors.joined],
    }
    return about, list(tensors.values())


def _take(survivors: StepRecovery, about: Mapping[str, Any]) -> None:
    run, watch = survivors.run, survivors.watch
    run.steps_done, survivors.meetings = about["steps"], about["meetings"]
    run._table.names, run._state.saved_after = about["columns"], about["saved_after"]
    run.changes[:], run.differences[:] = about["changes"], about["differences"]
    run._identity["device"] = about["machine"]["device"]  # of all processes; ours was that of one who is alone
    if watch is not None:
        watch.same_after = about["same_after"]
    survivors.deaths, survivors.joined = about["deaths"]


def _refuse_another_machine(survivors: StepRecovery, theirs: Mapping[str, Any]) -> None:
    ours = survivors.run._identity
    fixed = [name for name in ENVIRONMENT if not (name == "device" and survivors.group.mixed)]
    if differ := [name for name in fixed if theirs.get(name) != ours.get(name)]:
        raise WorldError(
            f"Process {survivors.company.number} was to join a run that is in the midst of it.",
            f"Its machine differs in {', '.join(differ)}, which changes bits.",
            "replace processes on machines of the same kind.",
        )


def _state_of(run: Run[Any]) -> Any:
    """Return the state of all that is tracked: by name, or as a snapshot of what this process has of a shared model."""
    if run._mesh.torchs is None:
        return {name: thing.state_dict() for name, thing in run._state.tracked.items()}
    run._models.reshard()
    live = live_state(run._state.tracked)
    still, moving = (FlatTensors.copy_of(tensors, run.device) for tensors in (live.still, live.moving))
    return Snapshot(run.steps_done, still, moving, live.names, live.plain)


def _load(run: Run[Any], state: Any, steps: int) -> None:
    """Load a state that was decoded."""
    if run._mesh.torchs is None:
        run._state.take(Checkpoint(Path("the memory of a survivor"), steps, {}, state))
    else:
        restore(Snapshot.of(*state), run._state.tracked, run.device)


PORTION_BYTES = 1 << 28
"""So much of a state that lies elsewhere has room on the device beside the model, which has come there already."""


def _portions(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """All bytes of these, in pieces of theirs that are not too many to be under way at once."""
    portion, held = list[torch.Tensor](), 0
    for piece in (piece for tensor in tensors for piece in as_bytes(tensor).split(PORTION_BYTES)):
        if portion and held + len(piece) > PORTION_BYTES:
            yield portion
            portion, held = [], 0
        portion.append(piece)
        held += len(piece)
    yield portion
