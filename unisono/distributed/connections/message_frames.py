"""The bytes of messages on a connection.

    | 8 bytes: tag      | 8 bytes: size          | up to FRAME_BYTES bytes |
    | 8 bytes: CONTINUE | 8 bytes: what is left  | up to FRAME_BYTES bytes |    (frames of a large message)

Messages with one tag arrive in the order in which they were sent. A small message overtakes large ones of other tags,
between two frames also one that is being sent. So a small collective does not wait until buckets of gradients arrive.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

HEADER = struct.Struct("!qQ")

SMALL_BYTES = 1 << 14
"""Up to this size a message is sent with its header as one record of TLS."""

FRAME_BYTES = 1 << 19
"""Most bytes of a message after which a small one may follow: 4 ms of a link of 1 Gbit/s."""

CONTINUE = -(1 << 63)
"""Is in place of the tag where a large message continues."""


class Transfer:
    """A message in progress.

    Args:
        view: the bytes that are sent, or the memory that is received into.
        owner: what owns that memory.
    """

    __slots__ = ("_done", "error", "owner", "then", "view")

    def __init__(self, view: memoryview, owner: Any = None) -> None:
        self.view, self.owner = view, owner
        self.error: RuntimeError | None = None
        self.then: Callable[[], None] | None = None
        self._done = threading.Event()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def end(self, error: RuntimeError | None = None) -> None:
        """Mark the message as done, or as failed."""
        if self._done.is_set():
            return
        self.error = error
        self._done.set()
        if self.then is not None:
            self.then()

    def wait(self, timeout: timedelta) -> None:
        """Wait until it is done. Raises RuntimeError if it fails, or is not done in time."""
        if not self._done.wait(timeout.total_seconds()):
            raise RuntimeError(f"Timed out waiting {timeout.total_seconds():g} s for a peer: the operation timed out")
        if self.error is not None:
            raise RuntimeError(str(self.error))


def frames(tag: int, view: memoryview) -> deque[memoryview]:
    """Return the headers and frames of a large message in turn."""
    parts: deque[memoryview] = deque()
    for first in range(0, len(view), FRAME_BYTES):
        header = HEADER.pack(CONTINUE if first else tag, len(view) - first)
        parts += (memoryview(header), view[first : first + FRAME_BYTES])
    return parts


@dataclass(eq=False, slots=True)
class _Outgoing:
    """A message that is to be sent: the parts of it that are left, of which none is empty."""

    tag: int
    parts: deque[memoryview]
    transfer: Transfer

    @property
    def is_large(self) -> bool:
        return len(self.transfer.view) > SMALL_BYTES

    @property
    def is_between_frames(self) -> bool:
        """Whether the next bytes are those of a header."""
        return len(self.parts) % 2 == 0 and len(self.parts[0]) == HEADER.size


class OutgoingMessages:
    """The messages to one peer that are to be sent, in the order in which they leave."""

    def __init__(self) -> None:
        self._waiting: deque[_Outgoing] = deque()
        self._begun: _Outgoing | None = None  # a part of a frame has been sent

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, tag: int, transfer: Transfer) -> None:
        """Add a message: a large one at the end, a small one before the large ones of other tags."""
        if len(transfer.view) > SMALL_BYTES:
            self._waiting.append(_Outgoing(tag, frames(tag, transfer.view), transfer))
            return
        place = 1 + max((n for n, message in enumerate(self._waiting) if message.tag == tag), default=-1)
        while place < len(self._waiting) and not self._waiting[place].is_large:
            place += 1
        content = memoryview(HEADER.pack(tag, len(transfer.view)) + bytes(transfer.view))
        self._waiting.insert(place, _Outgoing(tag, deque([content]), transfer))

    def next_part(self) -> memoryview:
        """Return the bytes to send next. There must be a message."""
        return (self._begun or self._waiting[0]).parts[0]

    def sent(self, count: int) -> None:
        """Remove the first bytes of the next part, which have been sent."""
        message = self._begun or self._waiting[0]
        part = message.parts.popleft()
        if count < len(part):
            message.parts.appendleft(part[count:])
        if message.parts:
            self._begun = None if message.is_between_frames else message
            return
        self._begun = None
        self._waiting.remove(message)
        message.transfer.end()

    def clear(self) -> list[Transfer]:
        """Remove and return all messages."""
        waiting = [message.transfer for message in self._waiting]
        self._waiting.clear()
        self._begun = None
        return waiting


@dataclass(eq=False, slots=True)
class Incoming:
    """A message of which a part has arrived.

    Attributes:
        tag: Its tag.
        body: The memory for all its bytes.
        into: The transfer that expects it; None: nothing does yet.
        filled: The number of its bytes that have arrived.
        frame_end: The number of bytes that will have arrived with the frame in progress.
    """

    tag: int
    body: memoryview
    into: Transfer | None
    filled: int = 0
    frame_end: int = 0

    def __post_init__(self) -> None:
        self.begin_frame()

    def begin_frame(self) -> None:
        """Receive another frame."""
        self.frame_end = min(len(self.body), self.filled + FRAME_BYTES)
