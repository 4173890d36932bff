"""Measure the link between two hosts with plain TCP, as the processes of a run connect to each other.

    host a                                  host b
    probe(address, port, token)             LinkProbe listens at a free port of an address
      proof of token   ◀──────────────▶     proof of token (handshake/mutual_proof.py)
      "P"              ───────────────▶
                       ◀───────────────     1 byte: half the round trip is the latency
      "B", n, n bytes  ───────────────▶
                       ◀───────────────     1 byte, when all have arrived: the bandwidth

The port accepts only connections that prove the token, which the launcher passes on. It discards what arrives, and
closes with the connection to the launcher.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from unisono.handshake.member_listener import MemberListener
from unisono.handshake.mutual_proof import RunSecret, prove

CONNECT_SECONDS = 5.0
"""Time limit for a connection between two hosts. Linux repeats a lost first packet after 1 s and 3 s."""

READ_SECONDS = 20.0
"""Time limit for an answer on a connection."""

TRIPS = 30
"""Round trips of one byte."""

ENOUGH_SECONDS = 0.1
"""The bandwidth is that of the first message that takes this long."""

SMALLEST, LARGEST = 1 << 16, 1 << 26
"""Bytes of the first and of the largest message."""

CHUNK = 1 << 20

PURPOSE = "link probe"
"""The kind of port, in proofs."""

POLL_SECONDS = 0.2


class LinkProbe:
    """Answers the probes of other hosts at a free port, until the process ends.

    Args:
        address: an address of this host.
        say: prints a line about connections that are refused.

    Attributes:
        port: the port.
        token: the secret that a probe must prove, in hexadecimal digits.

    Raises:
        OSError: this host does not have the address.
    """

    def __init__(self, address: str, say: Callable[[str], None]) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        server, secret = socket.create_server((address, 0), family=family, backlog=1024), RunSecret.random()
        self._listener = MemberListener(server, secret, PURPOSE, say)
        self.port, self.token = self._listener.address[1], secret.hex()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="link probe", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accept no more connections."""
        self._ended.set()
        self._thread.join()

    def _serve(self) -> None:
        with self._listener:
            while not self._ended.is_set():
                if (found := self._listener.accept(POLL_SECONDS)) is not None:
                    threading.Thread(target=self._answer, args=(found.connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        """Answer one probe, to the end of its connection."""
        space = memoryview(bytearray(CHUNK))
        with connection, contextlib.suppress(OSError, ValueError):
            connection.settimeout(READ_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while (kind := _read(connection, 1)) in (b"P", b"B"):
                left = struct.unpack("!Q", _read(connection, 8))[0] if kind == b"B" else 0
                while left:
                    count = connection.recv_into(space[: min(left, CHUNK)])
                    if not count:
                        return
                    left -= count
                connection.sendall(b".")


def probe(address: str, port: int, token: str) -> dict[str, Any]:
    """Measure the link from this host to a LinkProbe.

    Returns:
        `latency_seconds`, half the median round trip of one byte, and `bytes_per_second`; or `error`, the reason why
        there is no link, and `code`, the error number.
    """
    try:
        with socket.create_connection((address, port), CONNECT_SECONDS) as connection:
            connection.settimeout(READ_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            prove(connection, RunSecret.from_hex(token), PURPOSE, seconds=READ_SECONDS)
            trips = [_round_trip(connection, b"P") for _ in range(TRIPS)]
            return {"latency_seconds": statistics.median(trips[1:]) / 2, "bytes_per_second": _bandwidth(connection)}
    except OSError as error:
        return {"error": reason_of_failure(error), "code": error.errno or 0}


def reason_of_failure(error: OSError) -> str:
    """Return why a connection failed, as part of a sentence."""
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return f"no answer within {CONNECT_SECONDS:g} s"
    return (error.strerror or (os.strerror(error.errno) if error.errno else str(error))).lower()


def _bandwidth(connection: socket.socket) -> float:
    """Send messages of growing size until one takes long enough. Return bytes per second of the last one."""
    size, data = SMALLEST, memoryview(bytes(LARGEST))
    while True:
        took = _round_trip(connection, b"B" + struct.pack("!Q", size), data[:size])
        if took >= ENOUGH_SECONDS or size >= LARGEST:
            return size / took
        size *= 2


def _round_trip(connection: socket.socket, head: bytes, data: memoryview | None = None) -> float:
    """Send a message and wait for its answer. Return the seconds."""
    began = time.perf_counter()
    connection.sendall(head)
    if data is not None:
        connection.sendall(data)
    _read(connection, 1)
    return time.perf_counter() - began


def _read(connection: socket.socket, count: int) -> bytes:
    """Read this many bytes. Raises ConnectionResetError if the connection ends before."""
    found = b""
    while len(found) < count:
        data = connection.recv(count - len(found))
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "the other end closed the connection")
        found += data
    return found


class ProbeService:
    """Answers the questions of the launcher about this host's clock and links.

    Args:
        say: prints a line about connections that are refused.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._probes: list[LinkProbe] = []

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a question, with `error` if there is none."""
        if "listen" in question:
            try:
                found = LinkProbe(question["listen"], self._say)
            except OSError as error:
                return {"error": reason_of_failure(error)}
            self._probes.append(found)
            return {"port": found.port, "token": found.token}
        if "probe" in question:
            return probe(*question["probe"])
        return {"time": time.time()}

    def close(self) -> None:
        """Close the ports."""
        for each in self._probes:
            each.close()
