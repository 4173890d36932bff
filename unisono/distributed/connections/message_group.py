"""A process group of torch over connections of our own: its messages, and a thread for collectives.

collective_group.py has the collectives.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from unisono.distributed.connections.message_frames import Transfer
from unisono.distributed.connections.message_loop import LOOP
from unisono.distributed.connections.pairwise import Tensors
from unisono.distributed.connections.peer_connections import Identity, PeerConnections
from unisono.distributed.process_group import TIMEOUT

CONNECT_RELAXATION = 5
"""Connecting may take this many times the timeout with which a group is made, as with gloo."""

FIRST_TAG = -1
"""Collectives use negative tags, each another one: its phases are not as many on all processes, but the messages of two
processes are in the same order on both. Messages of the user have tags from 0."""


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU. Raises RuntimeError for another one."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise RuntimeError(f"This back end sends dense tensors on the CPU, not {tensor.layout} on {tensor.device}")
    if not tensor.is_contiguous():
        raise RuntimeError("This back end needs contiguous tensors")
    flat = tensor.detach().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(bytearray())


class MessageWork(dist.Work):
    """An operation in progress. Errors are raised by `wait`."""

    def __init__(self, results: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._results = list(results)
        self._done = threading.Event()
        self._error: RuntimeError | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._lock = threading.Lock()

    def end(self, error: RuntimeError | None) -> None:
        """Mark it as done, or as failed."""
        with self._lock:
            self._error = error
            self._done.set()
            future = self._future
        if future is not None:
            self._complete(future)

    def _complete(self, future: torch.futures.Future[Any]) -> None:
        if self._error is None:
            future.set_result(self._results)
        else:
            future.set_exception(self._error)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until it is done. Raises RuntimeError if it fails, or is not done in time."""
        limit = timeout or TIMEOUT
        if not self._done.wait(limit.total_seconds()):
            raise RuntimeError(f"Timed out waiting {limit.total_seconds():g} s for a peer: the operation timed out")
        if self._error is not None:
            raise RuntimeError(str(self._error))
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()

    def result(self) -> list[torch.Tensor]:
        return self._results

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the results."""
        with self._lock:
            if self._future is None:
                self._future = torch.futures.Future()
                if self._done.is_set():
                    self._complete(self._future)
            return self._future


class MessageGroup(dist.ProcessGroup):
    """A group that sends messages, and runs collectives one after the other.

    Attributes:
        place: the rank of this process.
        count: the number of processes.
    """

    def __init__(
        self, name: str, store: dist.Store, rank: int, size: int, timeout: timedelta, identity: Identity
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.place, self.count, self._name = rank, size, name
        self._peers = PeerConnections(store, rank, size, CONNECT_RELAXATION * timeout, identity)
        self._tag = FIRST_TAG
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._called: Any = ""

    # -- torch's properties of a group

    def getBackendName(self) -> str:
        return self._name

    def _set_group_name(self, name: Any) -> None:
        self._called = name

    @property
    def group_name(self) -> Any:
        return self._called

    def getRank(self) -> int:
        return self.place

    def getSize(self) -> int:
        return self.count

    def shutdown(self) -> None:
        """Close all connections. Operations in progress fail."""
        self._queue.put(None)
        self._peers.close()

    def abort(self) -> None:
        self.shutdown()

    # -- messages

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> MessageWork:
        return self._message(LOOP.send, tensors[0], rank, tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> MessageWork:
        return self._message(LOOP.receive, tensors[0], rank, tag)

    def _message(self, begin: Callable[..., None], tensor: torch.Tensor, rank: int, tag: int) -> MessageWork:
        work, transfer = MessageWork([tensor]), Transfer(bytes_of(tensor), tensor)
        transfer.then = lambda: work.end(transfer.error)
        begin(self._peers.stream(rank), tag, transfer)
        return work

    # -- collectives

    def trade(self, sends: Tensors, receives: Tensors) -> None:
        """Exchange messages as one phase of a collective. Called in the thread of the group."""
        transfers = []
        for begin, tensors in ((LOOP.receive, receives), (LOOP.send, sends)):
            for rank, tensor in tensors:
                if tensor.numel():
                    transfers.append(Transfer(bytes_of(tensor), tensor))
                    begin(self._peers.stream(rank), self._tag, transfers[-1])
        for transfer in transfers:
            transfer.wait(TIMEOUT)

    def _run(self, results: Sequence[torch.Tensor], *bodies: Callable[[], None]) -> MessageWork:
        """Run the parts of a collective after the collectives before it."""
        work = MessageWork(results)

        def run() -> None:
            error: RuntimeError | None = None
            try:
                with torch.no_grad():
                    for body in bodies:
                        body()
                        self._tag -= 1
            except RuntimeError as caught:
                error = caught
                self._peers.fail(str(caught))
            work.end(error)

        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="collectives", daemon=True)
            self._thread.start()
        self._queue.put(run)
        return work

    def _serve(self) -> None:
        while (run := self._queue.get()) is not None:
            run()

    @staticmethod
    def _fill(out: Sequence[torch.Tensor], body: Callable[[list[torch.Tensor]], None]) -> None:
        """Run a collective whose results may be tensors that are not contiguous."""
        into = [each if each.is_contiguous() else torch.empty(each.shape, dtype=each.dtype) for each in out]
        body(into)
        for target, received in zip(out, into, strict=True):
            if target is not received:
                target.copy_(received)


def flat_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with one dimension and the same memory. Raises RuntimeError if it is not contiguous."""
    bytes_of(tensor)
    return tensor.detach().reshape(-1)


def rows_of(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Return the equal parts of a tensor, flat."""
    flat = flat_of(tensor)
    size = len(flat) // count
    return [flat[rank * size : (rank + 1) * size] for rank in range(count)]


def split_rows(tensor: torch.Tensor, sizes: Sequence[int], count: int) -> list[torch.Tensor]:
    """Return the parts of a tensor by numbers of its rows; equal ones if there are no numbers."""
    bytes_of(tensor)
    rows = tensor.detach()
    return list(rows.split(list(sizes)) if sizes else rows.chunk(count))
