"""The group of processes, and the collectives on it. One process needs no group: everything here is then the identity.

Objects travel as JSON in byte tensors, never as pickles: nothing that arrives can run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from unisono import phases
from unisono.distributed.host_staging import staged, staging_buffer
from unisono.distributed.membership.waiting import GlooWork, NcclWork, SendWork
from unisono.errors import PeerLostError

if TYPE_CHECKING:
    from unisono.distributed.membership.membership import Membership

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""What nearly every tensor is: asking one of these for what it has not takes its time."""


def is_dtensor(tensor: Any) -> bool:
    """Does it lie over several processes (torch's DTensor), so that this one holds a part of it?"""
    return type(tensor) not in PLAIN and hasattr(tensor, "to_local")


def is_mixed_dtensor_error(error: BaseException) -> bool:
    """Does torch say here that a tensor which lies apart met one that does not? (2.13 has no type for that.)"""
    return "mixed torch.Tensor and DTensor" in str(error)


def to_local(tensor: Any) -> Any:
    """What this process holds of a tensor that lies over several; of any other, itself."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def from_local_like(part: torch.Tensor, whole: Any) -> torch.Tensor:
    """This process's part of a tensor that lies as `whole` does; where that lies here only, the part is all of it."""
    if not is_dtensor(whole):
        return part
    from torch.distributed.tensor import DTensor  # half a second

    mesh, placements = whole.device_mesh, whole.placements
    made: torch.Tensor = DTensor.from_local(
        part, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return made


class Work(Protocol):
    """A collective under way; `wait` returns when the result is there, and raises if a peer is lost."""

    def wait(self) -> Any: ...


def wait_for(works: Iterable[Work]) -> None:
    """Until all of them are over."""
    began = time.perf_counter()
    for work in works:
        work.wait()
    phases.CommWait.seconds += time.perf_counter() - began


# torch 2.13 gave these two new names and warns about the old ones
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Message(NamedTuple):
    """A contiguous tensor, and the rank that it goes to or comes from."""

    tensor: torch.Tensor
    peer: int


@contextmanager
def wrap_peer_errors(what: str) -> Iterator[None]:
    """A block of collectives: if a peer is gone, raises PeerLostError, which says what was being done."""
    try:
        yield
    except (RuntimeError, ConnectionError) as error:
        first = str(error).splitlines()[0]
        if not any(
            sign in first for sign in ("closed by peer", "reset by peer", "Broken pipe", "Timed out", "timed out")
        ):
            raise
        raise PeerLostError(
            f"{what} needed every process of the run.",
            f"One of them is gone or silent: {first}",
            "look at the other processes' logs; then start the same command with --resume.",
        ) from error


@dataclass(eq=False)
class ProcessGroup:
    """The processes of a run, or some of them: those of one line of its mesh (distributed/mesh.py).

    Whoever holds it holds what is so now: where processes may die and join (distributed/membership/membership.py), it
    becomes another one.

    rank        of this process among them, 0 to size - 1
    device      where collectives find their tensors
    mixed       whether processes have devices of different kinds. Messages are then staged on the CPU (host_staging.py)
    neighbours  {rank: process id} of those that share memory with this one (distributed/shared_memory.py)
    members     the rank in the whole run of each; empty: they are the whole run
    handle      torch's own group; None: that of the whole run
    company     who watches over their lives, if somebody does (distributed/membership/membership.py)
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    mixed: bool = False
    neighbours: Mapping[int, int] = field(default_factory=dict)
    members: tuple[int, ...] = ()
    handle: dist.ProcessGroup | None = None
    company: Membership | None = None

    def regroup(
        self,
        rank: int,
        size: int,
        neighbours: Mapping[int, int],
        members: tuple[int, ...] = (),
        handle: dist.ProcessGroup | None = None,
    ) -> None:
        """From now on these are its processes, and this is ours among them."""
        self.rank, self.size, self.neighbours, self.members, self.handle = rank, size, neighbours, members, handle

    @property
    def decides(self) -> bool:
        """Is this the process that decides for all, where one does?"""
        return self.rank == 0

    def attempt(self, body: Callable[[], Any]) -> bool:
        """Do something with the others in the midst of what only a step's end can mend: a model's forward pass, say,
        which gathers shards. False: somebody has died, and what it would have made is not there. The step's end will
        tell, and everybody makes it again; until then nothing more is attempted."""
        company = self.company
        if company is None or not company.watchful:
            body()
            return True
        if not company.torn:
            try:
                body()
            except (RuntimeError, ConnectionError) as error:
                company.tolerate_peer_loss(error)
        return not company.torn

    @property
    def on_gloo(self) -> bool:
        """Is it gloo by which our tensors travel? Only gloo knows tags."""
        return self.wire.type == "cpu" and not (self.company is not None and self.company.late)

    @property
    def wire(self) -> torch.device:
        """Where a tensor lies that travels."""
        return torch.device("cpu") if self.mixed else self.device

    def all_reduce(self, tensor: torch.Tensor, *, largest: bool = False) -> Work:
        """Begin to sum `tensor` over all processes, in place; or to find the largest of each element."""
        op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        here = tensor.to(self.wire)
        work = self._watched(dist.all_reduce(here, op=op, group=self.handle, async_op=True))
        return staged(work, here, tensor)

    def all_gather(self, out: torch.Tensor, mine: torch.Tensor) -> Work:
        """Begin to gather `mine` [n] of every process into `out` [size * n], in the order of ranks."""
        here = staging_buffer(out, self.wire)
        work = self._watched(_all_gather(here, mine.to(self.wire), group=self.handle, async_op=True))
        return staged(work, here, out)

    def send_and_receive(self, sends: Sequence[Message], receives: Sequence[Message], *, tag: int = 0) -> list[Work]:
        """Begin to send and to receive these. Between two processes, messages of one tag arrive in the order they were
        sent.

        With gloo this takes half the time of all_to_all and all_gather, which copy what stays where it is.
        """
        receives = [message for message in receives if message.tensor.numel()]
        sends = [message for message in sends if message.tensor.numel()]
        if self.on_gloo:  # it takes them one by one anyway: without the checks of a batch
            come: list[Work] = []
            for tensor, peer in receives:
                here = staging_buffer(tensor, self.wire)
                work = dist.irecv(here, group=self.handle, group_src=peer, tag=tag)
                come.append(staged(SendWork(work), here, tensor))
            gone = [dist.isend(t.to(self.wire), group=self.handle, group_dst=peer, tag=tag) for t, peer in sends]
            post = self.company.messenger if self.company is not None else None
            return come + [post.take(work) if post else SendWork(work) for work in gone]
        ops = [self.op(dist.irecv, message) for message in receives] + [
            self.op(dist.isend, message) for message in sends
        ]
        return [self._watched(work) for work in dist.batch_isend_irecv(ops)] if ops else []

    def _watched(self, work: Any) -> Work:
        """A collective that was begun: somebody may die in it, and the others go on."""
        company = self.company
        if company is None or company.is_joining:
            return work
        if company.late:
            return NcclWork(work, company)
        return GlooWork(work, company) if company.watchful else work

    def op(self, what: Any, message: Message) -> dist.P2POp:
        """A message as torch takes it; `what` is dist.isend or dist.irecv."""
        peer = self.members[message.peer] if self.members else message.peer
        return dist.P2POp(what, message.tensor, peer, self.handle)

    def all_to_all(self, mine: torch.Tensor, sizes: list[int], theirs: list[int]) -> torch.Tensor:
        """Of `mine`, flat, process p gets sizes[p] elements, in order; returned is what came, theirs[p] from each."""
        if mine.dtype is torch.bool:  # gloo does not know it
            return self.all_to_all(mine.view(torch.uint8), sizes, theirs).view(torch.bool)
        here = mine.to(self.wire)
        out = here.new_empty(sum(theirs))
        self._watched(dist.all_to_all_single(out, here, theirs, sizes, group=self.handle, async_op=True)).wait()
        return out.to(mine.device)

    def deterministic_all_reduce(self, flat: torch.Tensor) -> torch.Tensor:
        """The sum of everybody's `flat` [n], added in the order of ranks: the same bits on each, every time. Each
        process adds up one chunk of it. Elementwise, so the bits do not depend on where chunks end either."""
        if self.size == 1:
            return flat
        chunk = -(-len(flat) // self.size)
        padded = torch.nn.functional.pad(flat, (0, self.size * chunk - len(flat)))
        total, *others = self.all_to_all(padded, [chunk] * self.size, [chunk] * self.size).view(self.size, chunk)
        for other in others:
            total += other
        self.all_gather(padded, total).wait()
        return padded[: len(flat)]

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all processes, in place. Exact when every element has one writer and zeros elsewhere."""
        if self.size > 1:
            self.all_reduce(tensor).wait()
        return tensor

    def max_(self, tensor: torch.Tensor) -> torch.Tensor:
        """The largest over all processes, in place."""
        if self.size > 1:
            self.all_reduce(tensor, largest=True).wait()
        return tensor

    def all_gather_object(self, value: Any) -> list[Any]:
        """Everybody's `value` (anything that JSON carries), in the order of ranks."""
        if self.size == 1:
            return [value]
        mine = json.dumps(value).encode()
        sizes = torch.zeros(self.size, dtype=torch.int64, device=self.wire)
        sizes[self.rank] = len(mine)
        self.sum_(sizes)
        longest = int(sizes.max())
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        everybody = torch.empty(self.size * longest, dtype=torch.uint8, device=self.wire)
        self.all_gather(everybody, padded.to(self.wire)).wait()
        rows = everybody.cpu().view(self.size, longest)
        return [json.loads(bytes(row[: int(n)].tolist())) for row, n in zip(rows, sizes.tolist(), strict=True)]

    def broadcast_object(self, value: Any) -> Any:
        """The main process's `value` (anything that JSON carries), on every process."""
        return self.all_gather_object(value if self.rank == 0 else None)[0]

    def broadcast_(self, tensors: Iterable[torch.Tensor], source: int = 0) -> None:
        """Give every process the content that these tensors have on one of them, in place."""
        if self.size == 1:
            return
        for tensor in tensors:
            dense = tensor.detach().to(self.wire).contiguous()
            if dense.numel():  # as bytes, since a back end does not know every kind of number (gloo: int16, float8)
                root = self.members[source] if self.members else source
                flat = dense.reshape(-1).view(torch.uint8)
                self._watched(dist.broadcast(flat, src=root, group=self.handle, async_op=True)).wait()
            if dense.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(dense)

    def barrier(self) -> None:
        """Wait until everybody is here."""
        if self.size > 1:
            self.sum_(torch.zeros(1, device=self.wire))
