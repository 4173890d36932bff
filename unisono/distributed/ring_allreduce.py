"""All-reduce around a ring: every process exchanges messages with two others, and sends the least possible bytes.

A tensor is cut into as many chunks as there are processes. In n - 1 rounds each chunk moves around the ring, and every
process adds its own numbers (reduce-scatter). In n - 1 more rounds the sums move around (all-gather). Three processes,
with the content of the chunks 0, 1 and 2, and the chunk that each process sends to its right:

    round           rank 0              rank 1              rank 2           rank 0, 1, 2 send
                a0   a1   a2        b0   b1   b2        c0   c1   c2
      add       a0   a1   ca2       ab0  b1   b2        c0   bc1  c2             0, 1, 2
      add       a0   bca1 ca2       ab0  b1   cab2      abc0 bc1  c2             2, 0, 1
      copy      S0   S1   ca2       ab0  S1   S2        S0   bc1  S2             1, 2, 0
      copy      S0   S1   S2        S0   S1   S2        S0   S1   S2             0, 1, 2

So each process sends and receives 2 (n - 1) / n of the tensor's bytes, the least that any all-reduce can (Patarasuk and
Yuan 2009, https://doi.org/10.1016/j.jpdc.2008.09.002). Baidu brought the ring to deep learning in 2017
(https://github.com/baidu-research/baidu-allreduce). A chunk is cut into pieces that are sent separately: while one is
added, others arrive.

The sum of chunk i begins at process i and follows the ring, so the order of addition depends on the number of
processes. All processes get the same bits, because each sum is computed once and copied.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from unisono.distributed.process_group import Message, ProcessGroup, Work, wait_for

PIECE_BYTES = 2**21
"""Size of a piece. Smaller ones overlap addition with receiving better, but each message has a fixed cost."""

IN_FLIGHT = 3
"""Pieces in progress at the same time: one arrives while another is added."""


class Ring(Protocol):
    """Processes in a ring. A peer is its place in it."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def send_and_receive(self, sends: Sequence[Message], receives: Sequence[Message]) -> list[Work]: ...


def ring_all_reduce_(group: Ring, flat: torch.Tensor, piece_bytes: int = PIECE_BYTES) -> torch.Tensor:
    """Sum `flat` [n] over all processes, in place. Collective."""
    size, rank = group.size, group.rank
    if size == 1 or not len(flat):
        return flat
    assert flat.dim() == 1
    assert flat.is_contiguous()
    count = -(-flat.nbytes // (size * piece_bytes))  # pieces a chunk, the same on every process
    chunks = [chunk.tensor_split(count) for chunk in flat.tensor_split(size)]
    ahead = min(count, IN_FLIGHT)  # a piece starts its next round when the previous one is over
    buffers = _receive_buffers(chunks[0][0], ahead)  # no piece is longer than the first
    right, left = (rank + 1) % size, (rank - 1) % size
    adding, rounds = size - 1, 2 * (size - 1)
    works: list[Work | None] = [None] * ahead  # receives; the whole turn if a batch is sent as one
    sent: list[Work] = []  # nothing writes to a sent piece before its sum returns, and then the piece has arrived

    def receives(turn: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this process's part of the piece that arrives in a turn, and the buffer in which it arrives."""
        number, piece = divmod(turn, count)
        mine = chunks[(rank - number - 1) % size][piece]
        return mine, buffers[turn % ahead][: len(mine)] if number < adding else mine

    def begin(turn: int) -> None:
        """Start a send and a receive as one batch. One after the other, they would hang with NCCL."""
        number, piece = divmod(turn, count)
        outgoing = chunks[(rank - number) % size][piece]
        started = group.send_and_receive([Message(outgoing, right)], [Message(receives(turn)[1], left)])
        works[turn % ahead] = started[0] if started else None
        sent.extend(started[1:])

    for turn in range(ahead):
        begin(turn)
    for turn in range(rounds * count):
        if (work := works[turn % ahead]) is not None:
            work.wait()
        mine, arrived = receives(turn)
        if turn < adding * count:
            mine.add_(arrived)
        if turn + ahead < rounds * count:
            begin(turn + ahead)
    wait_for(sent)
    return flat


_buffers = threading.local()


def _receive_buffers(piece: torch.Tensor, count: int) -> torch.Tensor:
    """Return memory [count, n] for pieces like this one.

    It is kept for each thread: the page faults of new memory cost a fifth of the bandwidth.
    """
    kept: dict[Any, torch.Tensor] = _buffers.__dict__.setdefault("kept", {})
    found = kept.get((piece.dtype, piece.device))
    if found is None or found.numel() < count * len(piece):
        found = kept[piece.dtype, piece.device] = piece.new_empty(count * len(piece))
    return found[: count * len(piece)].view(count, len(piece))


Operation = Callable[[ProcessGroup, torch.Tensor], Any]
"""Sums a tensor over the processes of a group, in place."""


class TransferWork(NamedTuple):
    """A tensor whose all-reduce is in progress in a thread."""

    done: threading.Event
    error: list[BaseException]

    def wait(self) -> None:
        self.done.wait()
        for error in self.error:
            raise error


class TransferThread:
    """All-reduce one tensor after the other in a thread, while the caller computes.

    torch's operators and gloo's waits release the interpreter lock. All processes pass the same tensors in the same
    order. A process has one such thread for a group (`transfer_thread`), since the messages of two would mix.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.users = 0
        self._waiting: queue.SimpleQueue[tuple[Operation, torch.Tensor, TransferWork] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, flat: torch.Tensor, operation: Operation = ring_all_reduce_) -> Work:
        """Start to sum `flat` [n] over all processes, in place."""
        if self._thread is None:
            # a daemon, so that a process which fails elsewhere ends, instead of waiting for peers that wait for it
            self._thread = threading.Thread(target=self._run, name="ring", daemon=True)
            self._thread.start()
        work = TransferWork(threading.Event(), [])
        self._waiting.put((operation, flat, work))
        return work

    def close(self) -> None:
        """Remove one user; the last one stops the thread. Does not wait for transfers in progress."""
        self.users -= 1
        if self.users <= 0:
            _threads.pop(_key(self.group), None)
            self._waiting.put(None)

    def _run(self) -> None:
        if self.group.device.type != "cpu":
            torch.accelerator.set_device_index(self.group.device)  # each thread has its own current device
        while (next_ := self._waiting.get()) is not None:
            operation, flat, work = next_
            try:
                operation(self.group, flat)
            except BaseException as error:  # raised by work.wait()
                work.error.append(error)
            finally:
                work.done.set()
            del operation, flat, next_  # free the memory now, not at the next tensor


_threads: dict[Any, TransferThread] = {}


def transfer_thread(group: ProcessGroup) -> TransferThread:
    """Return the thread of this group in this process. Call `close` when it is no longer needed."""
    thread = _threads.setdefault(_key(group), TransferThread(group))
    thread.users += 1
    return thread


def _key(group: ProcessGroup) -> Any:
    return group.handle or dist.group.WORLD
