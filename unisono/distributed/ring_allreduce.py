"""All-reduce around a ring: every process talks to its two neighbours only, and sends no more than it must.

A tensor is cut into as many chunks as there are processes. In n - 1 rounds each chunk travels around the ring, and
every process that it comes to adds its own numbers (reduce-scatter); in n - 1 more the sums go around (all-gather).
Three processes, what each holds of the chunks 0, 1 and 2, and which of them each sends to its right:

    round           rank 0              rank 1              rank 2           rank 0, 1, 2 send
                a0   a1   a2        b0   b1   b2        c0   c1   c2
      add       a0   a1   ca2       ab0  b1   b2        c0   bc1  c2             0, 1, 2
      add       a0   bca1 ca2       ab0  b1   cab2      abc0 bc1  c2             2, 0, 1
      copy      S0   S1   ca2       ab0  S1   S2        S0   bc1  S2             1, 2, 0
      copy      S0   S1   S2        S0   S1   S2        S0   S1   S2             0, 1, 2

So each sends and receives 2 (n - 1) / n of the tensor's bytes, whatever n is, and no all-reduce can do with less
(Patarasuk and Yuan 2009, https://doi.org/10.1016/j.jpdc.2008.09.002). Baidu brought it to deep learning in 2017
(https://github.com/baidu-research/baidu-allreduce). A chunk is cut into pieces, and each travels on its own: while one
is added up, others arrive.

The sum of a chunk begins at the process of its number and follows the ring, so the order of addition depends on how
many processes there are. All of them have the same bits, since each sum is made once and copied.
"""

from __future__ import annotations

import queue
import threading
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from unisono.distributed.process_group import Message, ProcessGroup, Work, wait_for

PIECE_BYTES = 2**21
"""Of what travels at once. With less, adding overlaps better with receiving, but every message has its price."""

IN_FLIGHT = 3
"""Pieces on their way at the same time: one arrives while another is added up."""


def ring_all_reduce_(group: ProcessGroup, flat: torch.Tensor, piece_bytes: int = PIECE_BYTES) -> torch.Tensor:
    """The sum of everybody's `flat` [n], in place. Every process of the group must call it."""
    size, rank = group.size, group.rank
    if size == 1 or not len(flat):
        return flat
    assert flat.dim() == 1, "a row"
    assert flat.is_contiguous(), "without gaps"
    count = -(-flat.nbytes // (size * piece_bytes))  # of pieces: the same in every chunk, on every process
    chunks = [chunk.tensor_split(count) for chunk in flat.tensor_split(size)]
    ahead = min(count, IN_FLIGHT)  # a piece leaves for its next round when the last one is over
    arrived = _room(chunks[0][0], ahead)  # no piece is longer than the first
    right, left = (rank + 1) % size, (rank - 1) % size
    adding, rounds = size - 1, 2 * (size - 1)
    works: list[Work | None] = [None] * ahead  # what is received, or all of a turn where a library knows no parts of it
    sent: list[Work] = []  # nobody writes to what is sent before its sum comes around, and then it has arrived

    def receives(turn: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Our part of what comes in a turn, and where it comes to."""
        number, piece = divmod(turn, count)
        ours = chunks[(rank - number - 1) % size][piece]
        return ours, arrived[turn % ahead][: len(ours)] if number < adding else ours

    def begin(turn: int) -> None:
        """A send and a receive, together: a library that does one thing after the other (NCCL) does not hang then."""
        number, piece = divmod(turn, count)
        mine = chunks[(rank - number) % size][piece]
        both = group.send_and_receive([Message(mine, right)], [Message(receives(turn)[1], left)])
        works[turn % ahead] = both[0] if both else None
        sent.extend(both[1:])

    for turn in range(ahead):
        begin(turn)
    for turn in range(rounds * count):
        if (work := works[turn % ahead]) is not None:
            work.wait()
        ours, theirs = receives(turn)
        if turn < adding * count:
            ours.add_(theirs)
        if turn + ahead < rounds * count:
            begin(turn + ahead)
    wait_for(sent)
    return flat


_rooms = threading.local()


def _room(piece: torch.Tensor, count: int) -> torch.Tensor:
    """Room [count, n] for pieces like this one. It is kept, for each thread: page faults of fresh memory cost a fifth
    of the bandwidth."""
    kept: dict[Any, torch.Tensor] = _rooms.__dict__.setdefault("kept", {})
    found = kept.get((piece.dtype, piece.device))
    if found is None or found.numel() < count * len(piece):
        found = kept[piece.dtype, piece.device] = piece.new_empty(count * len(piece))
    return found[: count * len(piece)].view(count, len(piece))


class TransferWork(NamedTuple):
    """A tensor that is on its way; `wait` until its sum is there."""

    over: threading.Event
    error: list[BaseException]

    def wait(self) -> None:
        self.over.wait()
        for error in self.error:
            raise error


class TransferThread:
    """Carries one tensor after the other around the ring, in a thread: whoever hands them over goes on computing.

    torch's operators and gloo's waiting leave Python's lock to others meanwhile. All processes hand over the same
    tensors in the same order; and in a process there is one carrier for a group (`carrier_of`), since the messages of
    two would mix.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.users = 0
        self._waiting: queue.SimpleQueue[tuple[torch.Tensor, TransferWork] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, flat: torch.Tensor) -> Work:
        """Begin to sum `flat` [n] over all processes, in place."""
        if self._thread is None:
            # a daemon: a process that fails elsewhere leaves, instead of waiting for peers that wait for it
            self._thread = threading.Thread(target=self._carry, name="ring", daemon=True)
            self._thread.start()
        carried = TransferWork(threading.Event(), [])
        self._waiting.put((flat, carried))
        return carried

    def close(self) -> None:
        """One user less. Does not wait for what is on its way."""
        self.users -= 1
        if self.users <= 0:
            _carriers.pop(_key(self.group), None)
            self._waiting.put(None)

    def _carry(self) -> None:
        if self.group.device.type != "cpu":
            torch.accelerator.set_device_index(self.group.device)  # every thread has its own
        while (next_ := self._waiting.get()) is not None:
            flat, carried = next_
            try:
                ring_all_reduce_(self.group, flat)
            except BaseException as error:  # whoever waits for it raises it
                carried.error.append(error)
            finally:
                carried.over.set()
            del flat, next_  # or its memory would stay until the next one comes


_carriers: dict[Any, TransferThread] = {}


def carrier_of(group: ProcessGroup) -> TransferThread:
    """The carrier of this group in this process; `close` it when it is no longer needed."""
    carrier = _carriers.setdefault(_key(group), TransferThread(group))
    carrier.users += 1
    return carrier


def _key(group: ProcessGroup) -> Any:
    return group.handle or dist.group.WORLD
