"""Replicas of shards: every shard, with its optimizer state, has a copy on another process of the axis `shard`.

Processes with whole models are copies of each other. If several processes share one model, each part exists only once
and is lost with its process. Therefore each process sends a copy of its part half an axis further after every step. As
ranks are numbered by host, that is on another host if the axis has several:

    process   0          1          2          3
    has       shard 0    shard 1    shard 2    shard 3
    keeps     copy of 2  copy of 3  copy of 0  copy of 1     recoverable losses: process 0, process 1, or both;
                                                             not recoverable: 0 and 2 at once (shard 0 is lost)

(Checkpoints in the memory of other processes: Wang et al., GEMINI, SOSP 2023.) A copy is packed between two steps, and
is sent while the next step computes:

    step n       ... update | pack n, send n
    step n + 1   rounds ..... received | synchronize: all have n | update | pack n + 1, send n + 1

Each process waits for its copy before it synchronizes. After the synchronization, the copies of step n are therefore
complete everywhere. A process that dies later may not have sent step n + 1, although the others may have updated: then
all processes return to step n together. For this each process keeps two snapshots of its own and two of its neighbor.
One of the two may be half written; the other one is complete. In addition to its own state, each process then holds
four times the size of a shard with its optimizer state. With fewer than four shards, several whole models
(`parallel.replicate`) need less memory than that, and are copies as well.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from unisono import phases
from unisono.distributed.process_group import Message, Work, wait_for, wrap_peer_errors
from unisono.errors import CheckpointError, LoopError
from unisono.tensors.flat import FlatTensors
from unisono.tensors.spec import TensorSpec
from unisono.train.recovery.snapshot import LiveState, Snapshot, live_state, restore

if TYPE_CHECKING:
    from unisono.distributed.mesh import Mesh


class ReplicaTransfer(NamedTuple):
    """A neighbor's snapshot in transit to this process, and the messages in both directions."""

    parcel: Snapshot
    works: Sequence[Work]


class ShardReplica:
    """The place of this process on the axis. `mine` and `theirs`: snapshots of two steps, each complete or None."""

    def __init__(self, tracked: Mapping[str, Any], mesh: Mesh, rest: Callable[[], None]) -> None:
        """Create the replica of a process.

        Args:
            tracked: the objects that a resume needs, by name; more may be added until the first step is done.
            mesh: the process mesh.
            rest: a function that frees gathered parameters.
        """
        self.tracked, self.world, self.line, self.rest = tracked, mesh.world, mesh.shard, rest
        self.mine: list[Snapshot | None] = [None, None]
        self.theirs: list[Snapshot | None] = [None, None]
        self._turn = 0  # index of the newest snapshots
        self._travel: ReplicaTransfer | None = None
        self._seen: Any = None  # the key of the tensors in the last snapshot
        self._left: list[list[TensorSpec]] = []  # the specs of the neighbor's tensors: frozen, and changing
        self._next = copy_of(self.line.rank, self.line.size)
        self._previous = next(rank for rank in range(self.line.size) if copy_of(rank, self.line.size) == self.line.rank)

    def copy(self, step: int) -> None:
        """Begin to send a copy of the state after `step` steps. All processes of the axis call this together."""
        with phases.phase("exchange"), wrap_peer_errors("The copy of a shard"):
            self.settle()
            self.rest()
            device, content = self.world.device, live_state(self.tracked)
            last, last_of_theirs, seen = self.mine[self._turn], self.theirs[self._turn], content.seen()
            known = last is not None and last_of_theirs is not None and seen == self._seen
            if self.line.max_(torch.tensor([not known], dtype=torch.uint8, device=device)).item():
                last = last_of_theirs = None
                self._agree(content)
            self._seen = seen
            turn = self._turn = 1 - self._turn
            (mine, self.mine[turn]), (theirs, self.theirs[turn]) = (self.mine[turn], None), (self.theirs[turn], None)
            parcel = Snapshot(
                step,
                last.still if last else FlatTensors.copy_of(content.still, device),
                FlatTensors.copy_of(content.moving, device, mine.moving if mine else None),
                content.names,
                content.plain,
            )
            still, moving = self._left
            room = Snapshot(
                step,
                last_of_theirs.still if last_of_theirs else FlatTensors.empty(still, device),
                FlatTensors.empty(moving, device, theirs.moving if theirs else None),
            )
            sends = [Message(bag.data, self._next) for bag in _new(parcel, last)]
            receives = [Message(bag.data, self._previous) for bag in _new(room, last_of_theirs)]
            self.mine[turn] = parcel
            self._travel = ReplicaTransfer(room, self.line.send_and_receive(sends, receives))

    def settle(self) -> None:
        """Wait for the copy in transit. A process that synchronizes with the others after this has a complete copy."""
        if self._travel is not None:
            (parcel, works), self._travel = self._travel, None
            wait_for(works)
            self.theirs[self._turn] = parcel

    def _agree(self, content: LiveState) -> None:
        """Exchange the specs of tensors with the neighbors, when tensors have changed, as at the first step."""
        still, moving = ([TensorSpec.of(tensor) for tensor in tensors] for tensors in (content.still, content.moving))
        by_rank = self.line.all_gather_object([still, moving, content.names])
        if any(names != content.names for _, _, names in by_rank):
            raise LoopError(
                "parallel.replicate_shards cannot copy optimizers whose states differ between processes.",
                f"The states of the processes have {', '.join(f'{len(r[2])} tensors' for r in by_rank)}.",
                "--set parallel.replicate_shards=false",
            )
        self._left = [[TensorSpec.from_json(each) for each in abouts] for abouts in by_rank[self._previous][:2]]

    # -- restore

    @property
    def _members(self) -> Sequence[int]:
        """The ranks, in the run, of the processes of this axis."""
        return self.line.members or tuple(range(self.line.size))

    def newest(self, lost: Collection[int]) -> int:
        """Return the newest step that is complete on all processes, without the state of lost processes. All call this.

        Raises:
            CheckpointError: there is no such step. All processes raise the error.
        """
        return step_of(self.world.all_gather_object([self._members, _steps(self.mine), _steps(self.theirs)]), lost)

    def restore(self, lost: Collection[int]) -> int:
        """Restore lost shards from their replicas, and return all processes to the newest complete step.

        Models, optimizers and schedules get the exact bits of that step. Every process of the run calls this between
        two steps. A new process has first placed and tracked the same objects.

        Args:
            lost: ranks in the run whose state is lost.

        Returns:
            The step.

        Raises:
            CheckpointError: a process and the one with its copy are lost, so only a checkpoint has its state. All
                processes raise the error.
        """
        with wrap_peer_errors("Restoring shards from their copies"):
            with suppress(RuntimeError):  # a snapshot that did not arrive does not count
                self.settle()
            if is_lost := self.world.rank in lost:
                self.mine, self.theirs = [None, None], [None, None]
            self.rest()
            step = self.newest(lost)
            members = self._members
            mine, theirs = _at(step, self.mine), _at(step, self.theirs)
            gives = members[self._previous] in lost
            header = None
            if gives:
                assert mine
                assert theirs
                header = [theirs.still.specs, theirs.moving.specs, mine.names, mine.plain]
            headers = self.line.all_gather_object(header)
            sends = [Message(bag.data, self._previous) for bag in _new(theirs)] if gives else []
            if is_lost:
                still, moving, names, plain = headers[self._next]
                device = self.world.device
                bags = [FlatTensors.empty([*map(TensorSpec.from_json, specs)], device) for specs in (still, moving)]
                mine = Snapshot(step, bags[0], bags[1], names, plain)
            receives = [Message(bag.data, self._next) for bag in _new(mine)] if is_lost else []
            wait_for(self.line.send_and_receive(sends, receives))
        assert mine is not None
        restore(mine, self.tracked, self.world.device)
        self.mine, self.theirs, self._turn, self._seen = [mine, None], [theirs, None], 0, None
        self.copy(step)
        self.settle()
        return step


def copy_of(index: int, size: int) -> int:
    """Return the index of the process with the copy of a shard, on an axis of `size` processes."""
    return (index + max(1, size // 2)) % size


def _new(parcel: Snapshot | None, last: Snapshot | None = None) -> list[FlatTensors]:
    """Return the parts of a snapshot that have to be sent if the receiver already has the snapshot `last`."""
    assert parcel is not None
    return [parcel.moving] if last is not None else [parcel.still, parcel.moving]


def _steps(parcels: Sequence[Snapshot | None]) -> list[int]:
    return [parcel.step for parcel in parcels if parcel is not None]


def _at(step: int, parcels: Sequence[Snapshot | None]) -> Snapshot | None:
    return next((parcel for parcel in parcels if parcel is not None and parcel.step == step), None)


def step_of(said: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]], lost: Collection[int]) -> int:
    """Return the newest step of which every shard has a complete copy.

    Args:
        said: for each process of the run, the members of its axis, the steps of its own snapshots, and the steps of
            its neighbor's snapshots.
        lost: ranks whose state is lost.

    Raises:
        CheckpointError: there is no such step.
    """
    there: list[set[int]] = []
    for rank, (members, mine, _) in enumerate(said):
        if rank not in lost:
            there.append(set(mine))
            continue
        holder = members[copy_of(members.index(rank), len(members))]
        if holder in lost:
            raise CheckpointError(
                f"Cannot restore the shards of the lost processes {', '.join(map(str, sorted(lost)))}.",
                f"The copy of process {rank}'s shard was on process {holder}, which is lost, too.",
                "continue from the newest checkpoint: the same command with --resume.",
            )
        there.append(set(said[holder][2]))
    if not (whole := set.intersection(*there)):
        raise CheckpointError(
            f"Cannot restore the shards of the lost processes {', '.join(map(str, sorted(lost)))}.",
            "There is no step of which every shard has a whole copy: the first one was not over yet.",
            "continue from the newest checkpoint, or start again: the same command with --resume.",
        )
    return max(whole)
