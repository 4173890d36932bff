"""The messages between this process and one other, over one connection that does not block.

Messages may be sent and expected before there is a connection: they wait here. message_frames.py has their format.

A message is received into the memory of its tensor. If nothing expects the message that is next, it stays in the
connection, so the other process stops sending. There is one exception: something expects a message after it. Then it
is kept in memory.

Only the thread of the message loop uses a stream.
"""

from __future__ import annotations

import socket
import ssl
from collections import deque

from unisono.distributed.connections.message_frames import (
    CONTINUE,
    HEADER,
    SMALL_BYTES,
    Incoming,
    OutgoingMessages,
    Transfer,
)

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
        self._outgoing = OutgoingMessages()
        self._plain = False
        self._low_water = 1
        self._header = memoryview(bytearray(HEADER.size))
        self._header_filled = 0
        self._arriving: Incoming | None = None  # None: a header is next
        self._interrupted: Incoming | None = None  # a large message, between two of its frames
        self._held: tuple[int, int] | None = None  # tag and size of a message that nothing expects
        self._expected: dict[int, deque[Transfer]] = {}
        self._early: dict[int, deque[memoryview]] = {}

    # -- requests

    def send(self, tag: int, transfer: Transfer) -> None:
        """Send a message when those before it are sent."""
        if self.error is not None:
            transfer.end(self.error)
            return
        self._outgoing.add(tag, transfer)

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
                self._begin(*held)

    def fail(self, reason: str) -> None:
        """End all messages in progress with an error, and the connection with them."""
        if self.error is not None:
            return
        self.error = error = RuntimeError(f"{reason} ({self.peer})")
        waiting = self._outgoing.clear()
        waiting += [transfer for queue in self._expected.values() for transfer in queue]
        waiting += [
            each.into for each in (self._arriving, self._interrupted) if each is not None and each.into is not None
        ]
        self._expected.clear()
        self._arriving = self._interrupted = self._held = None
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
            try:
                count = self.socket.send(self._outgoing.next_part()[:CHUNK_BYTES])
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                return
            except OSError as error:
                self.fail(_reason(error))
                return
            sent += count
            self._outgoing.sent(count)

    def read(self) -> bool:
        """Receive what has arrived. Return whether more may be there without another event of the socket."""
        more = self._receive()
        self._set_low_water()
        return more

    def _set_low_water(self) -> None:
        """Let the next event of the socket wait for as many bytes of this message as are worth a wake-up."""
        arriving, slack = self._arriving, 0 if self._plain else RECORD_BYTES
        left = 0 if arriving is None else arriving.frame_end - arriving.filled - slack
        low_water = max(1, min(left, LOW_WATER))
        if low_water != self._low_water and self.socket is not None and self.error is None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)
            self._low_water = low_water

    def _receive(self) -> bool:
        received = 0
        while self.wants_read and self.socket is not None:
            if received >= TURN_BYTES:
                return True
            into = self._missing()
            try:
                count = self.socket.recv_into(into)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return False
            except OSError as error:
                self.fail(_reason(error))
                return False
            if not count:
                self.fail(CLOSED)
                return False
            received += count
            self._received(count)
            if count < len(into) and self._plain:  # nothing is left in the socket
                return False
        return False

    def _missing(self) -> memoryview:
        """Return the memory for the bytes that are next: the rest of a header, or of a frame."""
        arriving = self._arriving
        return (
            self._header[self._header_filled :]
            if arriving is None
            else arriving.body[arriving.filled : arriving.frame_end]
        )

    def _received(self, count: int) -> None:
        """Proceed after bytes that were received into `_missing`."""
        arriving = self._arriving
        if arriving is None:
            self._header_filled += count
            if self._header_filled == HEADER.size:
                self._header_filled = 0
                self._begin_frame(*HEADER.unpack(self._header))
            return
        arriving.filled += count
        if arriving.filled == len(arriving.body):
            self._arriving = None
            self._end(arriving)
        elif arriving.filled == arriving.frame_end:
            self._arriving, self._interrupted = None, arriving

    def _begin_frame(self, tag: int, size: int) -> None:
        """Prepare to receive the bytes after a header."""
        interrupted = self._interrupted
        if tag != CONTINUE:
            self._begin(tag, size)
        elif interrupted is not None and size == len(interrupted.body) - interrupted.filled:
            self._arriving, self._interrupted = interrupted, None
            interrupted.begin_frame()
        else:
            self.fail(f"{size} bytes continue a message that has not begun")

    def _begin(self, tag: int, size: int) -> None:
        """Prepare to receive a message."""
        queue, interrupted = self._expected.get(tag), self._interrupted
        if interrupted is not None and size > SMALL_BYTES:
            self.fail("A large message interrupts another one")
        elif queue:
            into = queue.popleft()
            if not queue:
                del self._expected[tag]
            self._arriving = Incoming(tag, into.view, into)
            if size != len(into.view):
                self.fail(f"A message has {size} bytes where {len(into.view)} were expected")
        elif self._expected or (interrupted is not None and interrupted.into is not None):
            self._arriving = Incoming(tag, memoryview(bytearray(size)), None)
        else:
            self._held = tag, size
        if self._arriving is not None and not size:
            arriving, self._arriving = self._arriving, None
            self._end(arriving)

    def _end(self, message: Incoming) -> None:
        """Deliver a message that has arrived."""
        queue = self._expected.get(message.tag)
        if message.into is not None:
            message.into.end()
        elif queue:  # a receive was requested while the message arrived
            transfer = queue.popleft()
            if not queue:
                del self._expected[message.tag]
            self._deliver(message.body, transfer)
        else:
            self._early.setdefault(message.tag, deque()).append(message.body)

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
