"""A connection with TLS behind a plain socket, for code that reads and writes descriptors.

    code --plain socket--> |thread of the pipe| --TLS over TCP--> |thread of the pipe| --plain socket--> code

The copy costs processor time, so it is for messages that are small or rare. The messages of a process group have a
thread of their own (distributed/connections/message_loop.py).
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import ssl
import threading
import time

from unisono.handshake.certificates import Credentials
from unisono.handshake.mutual_proof import PROOF_SECONDS

CHUNK_BYTES = 1 << 16

FLUSH_SECONDS = 3.0
"""Time limit for sending what was written before the connection is closed: the other host may be gone."""

ACCEPTED = b"\x01"
"""What the end that listens sends through TLS when it has accepted the certificate of the other end."""


class EncryptedPipe(socket.socket):
    """The plain end. Closing it sends what was written before."""

    __slots__ = ("thread",)

    thread: threading.Thread

    def close(self) -> None:
        super().close()
        if threading.current_thread() is not self.thread:
            self.thread.join(FLUSH_SECONDS)


def encrypt(
    connection: socket.socket, credentials: Credentials, *, listens: bool, seconds: float = PROOF_SECONDS
) -> EncryptedPipe:
    """Begin TLS on a connection, and return a plain socket for what it carries. The connection belongs to that.

    Args:
        connection: the connection, of which no byte is unread.
        credentials: the certificate of this process, and what it demands of the other end.
        listens: whether this end has accepted the connection.
        seconds: time limit for the handshake.

    Raises:
        OSError: the handshake fails; the connection is closed.
    """
    secured = handshake(connection, credentials, listens=listens, seconds=seconds)
    near, far = socket.socketpair()
    pipe = EncryptedPipe(near.family, near.type, near.proto, fileno=near.detach())
    pipe.thread = threading.Thread(target=_copy, args=(secured, far), name="TLS", daemon=True)
    pipe.thread.start()
    return pipe


def handshake(
    connection: socket.socket, credentials: Credentials, *, listens: bool, seconds: float = PROOF_SECONDS
) -> ssl.SSLSocket:
    """Begin TLS on a connection. When this returns, both ends have accepted the certificate of the other one.

    In TLS 1.3 the end that connects has finished before its certificate is checked, so it waits for an answer.

    Raises:
        OSError: the handshake fails; the connection is closed.
    """
    connection.settimeout(seconds)
    secured: ssl.SSLSocket | None = None
    try:
        if listens:
            secured = credentials.server.wrap_socket(connection, server_side=True)
            secured.sendall(ACCEPTED)
        else:
            secured = credentials.client.wrap_socket(connection)
            if secured.recv(1) != ACCEPTED:
                raise ConnectionResetError("the other end has closed the connection")
        secured.settimeout(None)
    except BaseException:
        (secured or connection).close()
        raise
    return secured


def _copy(secured: ssl.SSLSocket, plain: socket.socket) -> None:
    """Copy in both directions until one end closes, and what it has sent is passed on."""
    secured.setblocking(False)
    plain.setblocking(False)
    outward, inward = memoryview(b""), memoryview(b"")
    ended, until = False, math.inf
    with secured, plain, contextlib.suppress(OSError):
        while not ended or ((outward or inward) and time.monotonic() < until):
            writes: list[socket.socket] = []
            before = len(outward), len(inward), ended
            if not outward and not ended:
                outward, ended = _take(plain, outward, ended=ended)
            if not inward and not ended:
                inward, ended = _take(secured, inward, ended=ended)
            if outward:
                outward = _give(secured, outward)
                writes += [secured] if outward else []
            if inward:
                inward = _give(plain, inward)
                writes += [plain] if inward else []
            if ended and until == math.inf:
                until = time.monotonic() + FLUSH_SECONDS
            if before == (len(outward), len(inward), ended):
                reads = ([] if outward else [plain]) + ([] if inward else [secured])
                wait_until_ready([] if ended else reads, writes, FLUSH_SECONDS if ended else None)


def _take(source: socket.socket, kept: memoryview, *, ended: bool) -> tuple[memoryview, bool]:
    """Return what has arrived, and whether the connection has ended."""
    try:
        data = source.recv(CHUNK_BYTES)
    except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
        return kept, ended
    return memoryview(data), not data


def _give(target: socket.socket, data: memoryview) -> memoryview:
    """Send what fits, and return the rest."""
    try:
        return data[target.send(data) :]
    except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
        return data


def wait_until_ready(reads: list[socket.socket], writes: list[socket.socket], seconds: float | None) -> None:
    """Wait until one of these sockets can be read or written, for this time at most."""
    poll = select.poll()
    for each in {*reads, *writes}:
        poll.register(each, select.POLLIN * (each in reads) | select.POLLOUT * (each in writes))
    poll.poll(None if seconds is None else 1000 * seconds)
