"""The messages between this process and one other, over one connection that does not block.

Messages may be sent and expected before there is a connection: they wait here.

    | 8 bytes: tag      | 8 bytes: size          | up to FRAME_BYTES bytes |
    | 8 bytes: CONTINUE | 8 bytes: what is left  | up to FRAME_BYTES bytes |    (frames of a large message)

Messages with one tag arrive in the order in which they were sent. A small message overtakes large ones of other tags,
between two frames also one that is being sent. So a small collective does not wait until buckets of gradients arrive.

A message is received into the memory of its tensor. If nothing expects the message that is next, it stays in the
connection, so the other process stops sending. There is one exception: something expects a message behind it. Then it
is kept in memory.

Only the thread of the message loop uses a stream.
"""

from __future__ import annotations

import socket
import ssl
import struct
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

HEADER = struct.Struct("!qQ")

SMALL_BYTES = 1 << 14
"""Up to this size a message is sent with its header as one record of TLS."""

FRAME_BYTES = 1 << 19
"""Most bytes of a message after which a small one may follow: 4 ms of a link of 1 Gbit/s."""

CONTINUE = -(1 << 63)
"""Is in place of the tag where a large message continues."""

UNSENT_BYTES = 1 << 21
"""Most bytes in the kernel that wait to be sent. A small message waits for them, too."""

CHUNK_BYTES = 1 << 18
"""Most bytes of one call to send."""

TURN_BYTES = 1 << 20
"""Bytes after which another connection takes its turn."""

LOW_WATER = 1 << 18
"""Bytes of a large message for which the thread is woken. A wake-up takes the interpreter lock from the main thread."""

RECORD_BYTES = (1 << 14) + 512
"""Most bytes of a record of TLS (RFC 8446, 5.2), of which a part may have been read."""

CLOSED = "Connection closed by peer"


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
        """Whether the next bytes to be sent are those of a header."""
        return len(self.parts) % 2 == 0 and len(self.parts[0]) == HEADER.size


class _Incoming(NamedTuple):
    """A large message that is received, between two of its frames: the arguments are those of PeerStream."""

    tag: int
    body: memoryview
    filled: int
    into: Transfer | None


def frames(tag: int, view: memoryview) -> deque[memoryview]:
    """Return the headers and frames of a message in turn."""
    parts: deque[memoryview] = deque()
    for first in range(0, len(view), FRAME_BYTES):
        header = HEADER.pack(CONTINUE if first else tag, len(view) - first)
        parts += (memoryview(header), view[first : first + FRAME_BYTES])
    return parts


class PeerStream:
    """The connection to one other process.

    Args:
        peer: the other process, for errors: "rank 3 on host b".

    Attributes:
        socket: a socket, or one with TLS; None before there is a connection.
        error: why the connection has ended.
    """

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.socket: socket.socket | None = None
        self.error: RuntimeError | None = None
        self._outgoing: deque[_Outgoing] = deque()
        self._begun: _Outgoing | None = None  # the message of which a part of a frame has been sent
        self._header = memoryview(bytearray(HEADER.size))
        self._filled = 0  # bytes of the header, then of the body
        self._frame_end = 0
        self._interrupted: _Incoming | None = None
        self._plain = False
        self._low_water = 1
        self._tag = 0
        self._body: memoryview | None = None
        self._into: Transfer | None = None  # what the body is received for
        self._held: tuple[int, int] | None = None  # tag and size of a message that nothing expects
        self._expected: dict[int, deque[Transfer]] = {}
        self._early: dict[int, deque[memoryview]] = {}

    # -- requests

    def send(self, tag: int, transfer: Transfer) -> None:
        """Send a message when those before it are sent."""
        if self.error is not None:
            transfer.end(self.error)
            return
        if len(transfer.view) > SMALL_BYTES:
            self._outgoing.append(_Outgoing(tag, frames(tag, transfer.view), transfer))
            return
        place = 1 + max((n for n, message in enumerate(self._outgoing) if message.tag == tag), default=-1)
        while place < len(self._outgoing) and not self._outgoing[place].is_large:
            place += 1
        content = memoryview(HEADER.pack(tag, len(transfer.view)) + bytes(transfer.view))
        self._outgoing.insert(place, _Outgoing(tag, deque([content]), transfer))

    def receive(self, tag: int, transfer: Transfer) -> None:
        """Receive the next message with this tag."""
        early = self._early.get(tag)
        if early:
            self._deliver(early.popleft(), transfer)
            if not early:
                del self._early[tag]
        elif self.error is not None:
            transfer.end(self.error)
        else:
            self._expected.setdefault(tag, deque()).append(transfer)
            if self._held is not None:
                held, self._held = self._held, None
                self._begin_body(*held)

    def fail(self, reason: str) -> None:
        """End all messages in progress with an error, and the connection with them."""
        if self.error is not None:
            return
        self.error = error = RuntimeError(f"{reason} ({self.peer})")
        waiting = [message.transfer for message in self._outgoing]
        waiting += [transfer for queue in self._expected.values() for transfer in queue]
        waiting += [self._into] if self._into is not None else []
        if self._interrupted is not None and self._interrupted.into is not None:
            waiting.append(self._interrupted.into)
        self._outgoing.clear()
        self._expected.clear()
        self._into = self._body = self._held = self._begun = self._interrupted = None
        for transfer in waiting:
            transfer.end(error)

    # -- progress

    def attach(self, connection: socket.socket) -> None:
        """Use a connection from now on. It belongs to this object."""
        connection.setblocking(False)
        self.socket, self._plain = connection, not isinstance(connection, ssl.SSLSocket)
        if hasattr(socket, "TCP_NOTSENT_LOWAT") and connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)

    @property
    def wants_write(self) -> bool:
        return bool(self._outgoing) and self.socket is not None

    @property
    def wants_read(self) -> bool:
        return self.error is None and self._held is None and self.socket is not None

    def write(self) -> None:
        """Send as much as fits."""
        sent = 0
        while self._outgoing and self.socket is not None and sent < TURN_BYTES:
            message = self._begun or self._outgoing[0]
            view = message.parts[0]
            try:
                count = self.socket.send(view[:CHUNK_BYTES])
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                return
            except OSError as error:
                self.fail(_reason(error))
                return
            sent += count
            message.parts.popleft()
            if count < len(view):
                message.parts.appendleft(view[count:])
            if not message.parts:
                self._begun = None
                self._outgoing.remove(message)
                message.transfer.end()
            else:
                self._begun = None if message.is_between_frames else message

    def read(self) -> bool:
        """Receive what has arrived. Return whether more may be there without another event of the socket."""
        more = self._receive()
        self._set_low_water()
        return more

    def _set_low_water(self) -> None:
        """Let the next event of the socket wait for as many bytes of this message as are worth a wake-up."""
        left = 0 if self._body is None else self._frame_end - self._filled - (0 if self._plain else RECORD_BYTES)
        low_water = max(1, min(left, LOW_WATER))
        if low_water != self._low_water and self.socket is not None and self.error is None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)
            self._low_water = low_water

    def _receive(self) -> bool:
        received = 0
        while self.wants_read and self.socket is not None:
            if received >= TURN_BYTES:
                return True
            into = self._header if self._body is None else self._body[: self._frame_end]
            try:
                count = self.socket.recv_into(into[self._filled :])
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return False
            except OSError as error:
                self.fail(_reason(error))
                return False
            if not count:
                self.fail(CLOSED)
                return False
            received += count
            self._filled += count
            if self._filled == len(into):
                if self._body is None:
                    self._filled = 0
                    self._begin_frame(*HEADER.unpack(self._header))
                else:
                    self._end_frame()
            elif self._plain:  # nothing is left in the socket
                return False
        return False

    def _begin_frame(self, tag: int, size: int) -> None:
        """Prepare to receive the bytes behind a header."""
        interrupted = self._interrupted
        if tag != CONTINUE:
            self._begin_body(tag, size)
        elif interrupted is not None and size == len(interrupted.body) - interrupted.filled:
            self._tag, self._body, self._filled, self._into = interrupted
            self._frame_end = min(len(interrupted.body), self._filled + FRAME_BYTES)
            self._interrupted = None
        else:
            self.fail(f"{size} bytes continue a message that has not begun")

    def _end_frame(self) -> None:
        """Deliver the message, or keep what has arrived of it until its next frame."""
        assert self._body is not None
        if self._filled == len(self._body):
            self._end_body()
        elif self._interrupted is not None:
            self.fail("A large message interrupts another one")
        else:
            self._interrupted = _Incoming(self._tag, self._body, self._filled, self._into)
            self._body = self._into = None
        self._filled = 0

    def _begin_body(self, tag: int, size: int) -> None:
        """Prepare to receive the body of a message."""
        is_interrupting = self._interrupted is not None and self._interrupted.into is not None
        queue = self._expected.get(tag)
        self._tag = tag
        if queue:
            self._into = queue.popleft()
            if not queue:
                del self._expected[tag]
            if size != len(self._into.view):
                self.fail(f"A message has {size} bytes where {len(self._into.view)} were expected")
                return
            self._body = self._into.view
        elif self._expected or is_interrupting:
            self._body = memoryview(bytearray(size))
        else:
            self._held = tag, size
            return
        self._frame_end = min(size, FRAME_BYTES)
        if not size:
            self._end_body()

    def _end_body(self) -> None:
        body, into, self._body, self._into = self._body, self._into, None, None
        assert body is not None
        queue = self._expected.get(self._tag)
        if into is not None:
            into.end()
        elif queue:  # a receive was requested while the message arrived
            transfer = queue.popleft()
            if not queue:
                del self._expected[self._tag]
            self._deliver(body, transfer)
        else:
            self._early.setdefault(self._tag, deque()).append(body)

    def _deliver(self, body: memoryview, transfer: Transfer) -> None:
        """Complete a receive with a message that is in memory."""
        if len(body) != len(transfer.view):
            size = len(transfer.view)
            transfer.end(RuntimeError(f"A message has {len(body)} bytes where {size} were expected ({self.peer})"))
            return
        transfer.view[:] = body
        transfer.end()


def _reason(error: OSError) -> str:
    """Return an error as gloo would word it, so that one rule finds lost peers (errors.is_connection_error)."""
    if isinstance(error, (ssl.SSLZeroReturnError, ssl.SSLEOFError)):
        return CLOSED
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {(error.reason or str(error)).replace('_', ' ').lower()}. {CLOSED}"
    return f"{error.strerror or error}. {CLOSED}"
