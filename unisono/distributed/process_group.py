"""The group of processes, and its collectives. With one process each of them is the identity.

Objects are sent as JSON in byte tensors, never as pickles, so that received data cannot run code.

If some processes have an accelerator and others do not, all of them use gloo, which supports only the CPU. So do
processes that share an accelerator, which NCCL refuses. Tensors are then staged on the CPU:

    process 0   [ gradient ]  cuda:0  --copy-->  [ ] cpu  ==gloo==>  ...  [ sum ] cpu  --copy, in wait-->  cuda:0
    process 1   [ gradient ]  cpu     =========  the same tensor  ==>  ...  [ sum ] cpu

A copy from a device waits until the tensor has been computed there. A copy to a device is complete when it returns. If
each process has a device of its own, and all are of one kind, nothing is copied.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from unisono import phases
from unisono.errors import PeerLostError

TIMEOUT = timedelta(minutes=30)
"""Time limit of a collective that waits for a silent peer. A dead peer is detected at once: its connections break."""

PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
"""The types of nearly all tensors. A missing attribute of one of these is slow to look up."""


def is_dtensor(tensor: Any) -> bool:
    """Return whether the tensor is a DTensor, of which this process holds a part."""
    return type(tensor) not in PLAIN_TENSORS and hasattr(tensor, "to_local")


def is_mixed_dtensor_error(error: BaseException) -> bool:
    """Return whether torch refused to combine a DTensor with a plain tensor. (torch 2.13 has no type for that.)"""
    return "mixed torch.Tensor and DTensor" in str(error)


def to_local(tensor: Any) -> Any:
    """Return this process's part of a DTensor; any other tensor itself."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def from_local_like(part: torch.Tensor, whole: Any) -> torch.Tensor:
    """Return `part` as a DTensor with the mesh and placements of `whole`; `part` itself if `whole` is no DTensor."""
    if not is_dtensor(whole):
        return part
    from torch.distributed.tensor import DTensor  # the import takes 0.5 s

    mesh, placements = whole.device_mesh, whole.placements
    tensor: torch.Tensor = DTensor.from_local(
        part, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return tensor


class Work(Protocol):
    """A collective or message in progress. `wait` returns when it is done, and raises if a peer is lost."""

    def wait(self) -> Any: ...


class SendWork(NamedTuple):
    """A gloo message in progress.

    Without a timeout gloo would wait as long as connecting may take. A message keeps the timeout with which its group
    was created, and a later change of the timeout has no effect (torch 2.13).
    """

    work: Any

    def wait(self) -> Any:
        return self.work.wait(TIMEOUT)


class StagedWork:
    """A collective in progress whose result arrives in `source`, on the CPU, and is copied to `target` in `wait`."""

    def __init__(self, work: Work, source: torch.Tensor, target: torch.Tensor) -> None:
        self.work, self.source, self.target = work, source, target

    def wait(self) -> None:
        self.work.wait()
        if self.source is not self.target:  # copy once: the caller may write to the target afterward
            self.target.data.copy_(self.source)  # .data has its own version: autograd sees no change by the loop
            self.source = self.target


def wait_for(works: Iterable[Work]) -> None:
    """Wait until all of them are done."""
    began = time.perf_counter()
    for work in works:
        work.wait()
    phases.count_wait(time.perf_counter() - began)


# torch 2.13 renamed all_gather_into_tensor, and warns about the old name
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Message(NamedTuple):
    """A contiguous tensor, and the rank that sends or receives it."""

    tensor: torch.Tensor
    peer: int


class PeerMonitor(Protocol):
    """Detects lost peers (distributed/membership/membership.py), so that waiting for one ends with an error."""

    failed: bool
    """Whether a collective of the current group failed because a peer was lost."""
    tolerant: bool
    """Whether training continues without a lost peer."""
    async_errors: bool
    """Whether the back end does not report lost peers (NCCL)."""
    join_requested: bool
    """Whether a process waits to join the group."""
    joins: bool
    """Whether this process joins a group that is training."""

    def has_lost_peer(self, seconds: float = 0.0) -> bool: ...

    def is_peer_loss(self, error: BaseException) -> bool: ...

    def tolerate_peer_loss(self, error: Exception) -> None: ...

    def wrap(self, work: Any) -> Work:
        """Return a collective whose `wait` raises if a peer is lost."""

    def wrap_send(self, work: Any) -> Work:
        """Return a sent gloo message whose `wait` raises if a peer is lost."""


class PreparedMessages(NamedTuple):
    """Sends and receives whose operations are built, so that starting them is one call into torch each.

    works = prepared.wrap([start() for start in prepared.starts])
    """

    starts: Sequence[Callable[[], Any]]
    """Each starts one operation, or all of them; call them in this order."""
    wrap: Callable[[list[Any]], list[Work]]
    """Turn what the starts returned into works to wait for."""


@contextmanager
def wrap_peer_errors(operation: str) -> Iterator[None]:
    """Raise PeerLostError, which names the operation, if a peer is lost in this block of collectives."""
    try:
        yield
    except (RuntimeError, ConnectionError) as error:
        reason = str(error).splitlines()[0]
        signs = ("closed by peer", "reset by peer", "Broken pipe", "Timed out", "timed out")
        if not any(sign in reason for sign in signs):
            raise
        raise PeerLostError(
            f"{operation} failed: a process of the run is gone or silent.",
            f"The error was: {reason}",
            "look at the logs of the other processes; then start the same command with --resume.",
        ) from error


@dataclass(eq=False)
class ProcessGroup:
    """Processes that communicate. Elastic membership changes the set of processes (distributed/membership/).

    Attributes:
        rank: the rank of this process in the group, 0 to size - 1.
        size: the number of processes.
        device: the device of the tensors of collectives.
        mixed: whether processes have different kinds of devices.
        staged: whether messages are staged on the CPU, since the devices have no back end in common, or share one.
        neighbors: {rank: process id} of the processes that share memory with this one (shared_memory.py).
        hosts: for every rank the lowest rank with which it shares memory; empty: no two ranks share memory.
        members: the rank of each process in the whole run; empty if the group is the whole run.
        handle: torch's group; None for that of the whole run.
        monitor: detects lost peers; None if a lost peer ends the run.
        backend: the name of torch's back end.
        links: bytes per second of the link of each rank's host, equal on all processes (link_rates.py); empty: unknown.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    mixed: bool = False
    staged: bool = False
    neighbors: Mapping[int, int] = field(default_factory=dict)
    hosts: tuple[int, ...] = ()
    members: tuple[int, ...] = ()
    handle: dist.ProcessGroup | None = None
    monitor: PeerMonitor | None = None
    backend: str = "gloo"
    links: tuple[float, ...] = ()

    def regroup(
        self,
        rank: int,
        size: int,
        neighbors: Mapping[int, int],
        hosts: tuple[int, ...] = (),
        members: tuple[int, ...] = (),
        handle: dist.ProcessGroup | None = None,
    ) -> None:
        """Replace the processes of the group. The rates of their links become unknown."""
        self.links = ()
        self.rank, self.size, self.neighbors, self.hosts = rank, size, neighbors, hosts
        self.members, self.handle = members, handle

    @property
    def is_main(self) -> bool:
        """Whether this process makes the decisions that one process makes for all."""
        return self.rank == 0

    def attempt(self, body: Callable[[], Any]) -> bool:
        """Run collectives in the middle of a step, where a lost peer cannot be handled yet.

        A model's forward pass that gathers shards is an example. The end of the step handles the loss and repeats the
        work. Until then this process attempts no more collectives.

        Returns:
            Whether `body` ran to its end. If not, a peer is lost and its results are missing.
        """
        monitor = self.monitor
        if monitor is None or not monitor.tolerant:
            body()
            return True
        if not monitor.failed:
            try:
                body()
            except (RuntimeError, ConnectionError) as error:
                monitor.tolerate_peer_loss(error)
        return not monitor.failed

    @property
    def on_gloo(self) -> bool:
        """Whether messages are sent by gloo, or by our own back ends: these have tags."""
        if self.backend not in ("gloo", "tcp", "tls") or self.comm_device.type != "cpu":
            return False
        return self.monitor is None or not self.monitor.async_errors

    @property
    def comm_device(self) -> torch.device:
        """The device from which tensors are sent."""
        return torch.device("cpu") if self.staged else self.device

    def all_reduce(self, tensor: torch.Tensor, *, largest: bool = False) -> Work:
        """Start to sum `tensor` over all processes in place; with `largest`, to find the maximum of each element."""
        op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        staged = tensor.to(self.comm_device)
        work = self._wrap(dist.all_reduce(staged, op=op, group=self.handle, async_op=True))
        return work if staged is tensor else StagedWork(work, staged, tensor)

    def all_gather(self, out: torch.Tensor, mine: torch.Tensor) -> Work:
        """Start to gather `mine` [n] of every process into `out` [size * n], in the order of ranks."""
        staged = self._receive_buffer(out)
        work = self._wrap(_all_gather(staged, mine.to(self.comm_device), group=self.handle, async_op=True))
        return work if staged is out else StagedWork(work, staged, out)

    def send_and_receive(self, sends: Sequence[Message], receives: Sequence[Message], *, tag: int = 0) -> list[Work]:
        """Start to send and to receive messages. Messages between two processes with one tag arrive in order.

        With gloo this takes half the time of all_to_all and all_gather, which also copy the local data.

        Returns:
            A work for each message that is not empty, receives first; fewer if the back end sends a batch as one.
        """
        device, group = self.comm_device, self.handle
        receives = [message for message in receives if message.tensor.numel()]
        sends = [message for message in sends if message.tensor.numel()]
        if not self.on_gloo:
            ops = [*(self.op(dist.irecv, m) for m in receives), *(self.op(dist.isend, m) for m in sends)]
            return [self._wrap(work) for work in dist.batch_isend_irecv(ops)] if ops else []
        works: list[Work] = []  # gloo sends a batch one by one anyway, so its checks are left out
        for tensor, peer in receives:
            staged = self._receive_buffer(tensor)
            work = SendWork(dist.irecv(staged, group=group, group_src=peer, tag=tag))
            works.append(work if staged is tensor else StagedWork(work, staged, tensor))
        sent = [dist.isend(t.to(device), group=group, group_dst=peer, tag=tag) for t, peer in sends]
        wrap_send = SendWork if self.monitor is None else self.monitor.wrap_send
        return works + [wrap_send(work) for work in sent]

    def _receive_buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself if it is on the device that messages use, else a buffer there."""
        device = self.comm_device
        return tensor if tensor.device == device else torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

    def prepare_messages(self, sends: Sequence[Message], receives: Sequence[Message]) -> PreparedMessages:
        """Build the operations of `send_and_receive`, to be started later, once.

        The tensors that are sent are read when the operations start.
        """
        receives = [message for message in receives if message.tensor.numel()]
        sends = [message for message in sends if message.tensor.numel()]
        if self.on_gloo and not self.staged:
            irecvs = [partial(dist.irecv, t, group=self.handle, group_src=peer) for t, peer in receives]
            isends = [partial(dist.isend, t, group=self.handle, group_dst=peer) for t, peer in sends]
            return PreparedMessages([*irecvs, *isends], partial(self._wrap_messages, received=len(irecvs)))
        if self.on_gloo:  # copied to the CPU when they start
            return PreparedMessages([partial(self.send_and_receive, sends, receives)], lambda started: started[0])
        ops = [self.op(dist.irecv, message) for message in receives]
        ops += [self.op(dist.isend, message) for message in sends]
        starts = [partial(dist.batch_isend_irecv, ops)] if ops else []
        return PreparedMessages(starts, lambda started: [self._wrap(work) for works in started for work in works])

    def _wrap_messages(self, works: list[Any], received: int) -> list[Work]:
        """Wrap gloo's works: those of the `received` messages first, then those of the sends."""
        wrap_send = SendWork if self.monitor is None else self.monitor.wrap_send
        return [*map(SendWork, works[:received]), *map(wrap_send, works[received:])]

    def _wrap(self, work: Any) -> Work:
        return work if self.monitor is None else self.monitor.wrap(work)

    def op(self, kind: Any, message: Message) -> dist.P2POp:
        """Return a message as torch's P2POp. `kind` is dist.isend or dist.irecv."""
        peer = self.members[message.peer] if self.members else message.peer
        return dist.P2POp(kind, message.tensor, peer, self.handle)

    def all_to_all(self, mine: torch.Tensor, send_sizes: list[int], receive_sizes: list[int]) -> torch.Tensor:
        """Send send_sizes[p] elements of `mine`, flat and in order, to each process p.

        Returns:
            The received elements, receive_sizes[p] from each process p.
        """
        if mine.dtype is torch.bool:  # gloo does not support it
            return self.all_to_all(mine.view(torch.uint8), send_sizes, receive_sizes).view(torch.bool)
        staged = mine.to(self.comm_device)
        out = staged.new_empty(sum(receive_sizes))
        work = dist.all_to_all_single(out, staged, receive_sizes, send_sizes, group=self.handle, async_op=True)
        wait_for([self._wrap(work)])
        return out.to(mine.device)

    def deterministic_all_reduce(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the sum of all processes' `flat` [n], added in the order of ranks: the same bits on each, every time.

        Each process adds up one chunk. The sum is elementwise, so its bits do not depend on the bounds of the chunks.
        """
        if self.size == 1:
            return flat
        chunk = -(-len(flat) // self.size)
        padded = torch.nn.functional.pad(flat, (0, self.size * chunk - len(flat)))
        total, *others = self.all_to_all(padded, [chunk] * self.size, [chunk] * self.size).view(self.size, chunk)
        for other in others:
            total += other
        wait_for([self.all_gather(padded, total)])
        return padded[: len(flat)]

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over all processes in place. Exact if each element is nonzero on one process only."""
        if self.size > 1:
            wait_for([self.all_reduce(tensor)])
        return tensor

    def max_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take the maximum over all processes in place."""
        if self.size > 1:
            wait_for([self.all_reduce(tensor, largest=True)])
        return tensor

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every process's `value`, a JSON value, in the order of ranks."""
        if self.size == 1:
            return [value]
        mine = json.dumps(value).encode()
        sizes = torch.zeros(self.size, dtype=torch.int64, device=self.comm_device)
        sizes[self.rank] = len(mine)
        self.sum_(sizes)
        longest = int(sizes.max())
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        gathered = torch.empty(self.size * longest, dtype=torch.uint8, device=self.comm_device)
        wait_for([self.all_gather(gathered, padded.to(self.comm_device))])
        rows = gathered.cpu().view(self.size, longest)
        return [json.loads(bytes(row[: int(n)].tolist())) for row, n in zip(rows, sizes.tolist(), strict=True)]

    def broadcast_object(self, value: Any) -> Any:
        """Return rank 0's `value`, a JSON value, on every process."""
        return self.all_gather_object(value if self.rank == 0 else None)[0]

    def broadcast_(self, tensors: Iterable[torch.Tensor], source: int = 0) -> None:
        """Copy the content of these tensors from rank `source` to every process, in place."""
        if self.size == 1:
            return
        root = self.members[source] if self.members else source
        for tensor in tensors:
            dense = tensor.detach().to(self.comm_device).resolve_conj().resolve_neg().contiguous()
            if dense.numel():  # as bytes: a back end may not support the dtype (gloo: int16, float8)
                flat = dense.reshape(-1).view(torch.uint8)
                self._wrap(dist.broadcast(flat, src=root, group=self.handle, async_op=True)).wait()
            if dense.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(dense)

    def barrier(self) -> None:
        """Wait until every process has called this."""
        if self.size > 1:
            self.sum_(torch.zeros(1, device=self.comm_device))
