"""The end of a connection between two processes of a group that connects. door.py is the end that accepts."""

from __future__ import annotations

import socket
import ssl
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from unisono.distributed.connections.door import GO, PURPOSE, RANK, PeerAddress
from unisono.distributed.connections.peer_stream import CLOSED
from unisono.errors import CertificateError
from unisono.handshake.certificates import Credentials, describe, require_name
from unisono.handshake.encrypted_pipe import handshake
from unisono.handshake.mutual_proof import PROOF_SECONDS, RunSecret, prove

TRY_SECONDS = 3.0
"""Time limit for reaching one of several addresses of a host, in seconds."""

REFUSALS = 3
"""How often all addresses refuse before a process counts as gone: a process listens before it names its addresses."""

NEAR_SECONDS = 5e-3
"""The round-trip time below which two hosts count as near each other, in seconds."""

TCPI_RTT = struct.Struct("=68xI")
"""The place of tcpi_rtt in struct tcp_info, in microseconds (linux/tcp.h)."""


class Identity(NamedTuple):
    """What identifies this process to its peers.

    Attributes:
        host: the name of its host.
        credentials: its certificate, and what it demands of others; None: nothing is encrypted.
    """

    host: str
    credentials: Credentials | None


class Caller:
    """Connects to doors.

    Args:
        rank: the rank of this process.
        identity: what identifies this process to its peers.
    """

    def __init__(self, rank: int, identity: Identity) -> None:
        self._rank, self._identity = rank, identity

    def connect(self, address: PeerAddress, peer: int, until: float, is_over: Callable[[], bool]) -> socket.socket:
        """Return a connection to a process.

        Args:
            address: where the process accepts others.
            peer: its rank.
            until: when to give up, on the clock of time.monotonic.
            is_over: returns whether the connection is no longer needed.

        Raises:
            RuntimeError: the process cannot be reached in time.
            CertificateError: its certificate is not accepted.
        """
        if address.is_here():
            return self._connect_here(address, max(until - time.monotonic(), 0.001))
        reason, refusals = "it has no address", 0
        while time.monotonic() < until and not is_over() and refusals < REFUSALS * len(address.addresses):
            for each in address.addresses:
                try:
                    return self._connect_to(each, address, peer, until)
                except OSError as error:
                    if (text := describe(error, address.name(peer))) is not None:
                        raise certificate_error(text) from None
                    reason = f"{each}, port {address.port}: {error}"
                    refusals = refusals + 1 if isinstance(error, ConnectionRefusedError) else 0
            time.sleep(0.05)
        raise RuntimeError(f"Cannot connect to {address.name(peer)}: {reason}")

    def _connect_here(self, address: PeerAddress, seconds: float) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(seconds)
            connection.connect(address.path)
            connection.sendall(RANK.pack(self._rank) + bytes.fromhex(address.token))
        except OSError as error:
            connection.close()
            raise RuntimeError(f"{error.strerror or error}. {CLOSED}") from error
        return connection

    def _connect_to(self, at: str, address: PeerAddress, peer: int, until: float) -> socket.socket:
        """Connect to one address of a process. Raises OSError or CertificateError."""
        left = max(until - time.monotonic(), 0.001)
        connection = socket.create_connection((at, address.port), timeout=min(TRY_SECONDS, left))
        credentials = self._identity.credentials
        try:
            prove(connection, RunSecret.from_hex(address.token), PURPOSE, self._rank, min(PROOF_SECONDS, left))
            if credentials is not None:
                limit = max(until - time.monotonic(), 0.001)
                connection = secured = handshake(connection, credentials, listens=False, seconds=limit)
                require_name(credentials, secured, [address.host, at], address.name(peer))
            connection.sendall(GO)
        except BaseException:
            connection.close()
            raise
        return tuned(connection)

    def probe(self, address: PeerAddress) -> None:
        """Connect to the door of a process as a member, and close the connection. Raises OSError if it is gone."""
        if address.is_here():
            with suppress(RuntimeError):
                self._connect_here(address, TRY_SECONDS).close()
                return
            raise ConnectionRefusedError(0, "Connection refused")
        error: OSError | None = None
        for each in address.addresses:
            try:
                connection = socket.create_connection((each, address.port), timeout=TRY_SECONDS)
            except OSError as caught:
                error = error if isinstance(error, ConnectionRefusedError) else caught
            else:
                with connection, suppress(OSError):  # it is alive, even if it is too busy for a proof
                    prove(connection, RunSecret.from_hex(address.token), PURPOSE, self._rank, TRY_SECONDS)
                return
        raise error or ConnectionRefusedError(0, "it has no address")


def plain(address: str) -> str:
    """Return an IPv4 address as such that a socket for both versions has reported."""
    return address.removeprefix("::ffff:")


def certificate_error(text: str) -> CertificateError:
    """Return the error for what certificates.describe has said."""
    error, _, facts = text.partition(": ")
    do = "look at the dates and the issuer there: openssl x509 -noout -subject -issuer -dates -in FILE"
    return CertificateError(f"{error}.", f"{facts[:1].upper()}{facts[1:]}", do)


def tuned(connection: socket.socket | ssl.SSLSocket) -> socket.socket:
    """Let a connection send small messages at once, and send with cubic where BBR is the system's choice.

    The connections of a training step are idle most of the time, and BBR searches for the rate again after each pause.
    With cubic a step is shorter. A link with a long round trip keeps BBR, whose advantages are there.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sys.platform == "linux" and round_trip(connection) < NEAR_SECONDS:
        name = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")
        if name == b"bbr":
            with suppress(OSError):  # without permission: tcp_allowed_congestion_control does not list cubic
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    return connection


def round_trip(connection: socket.socket) -> float:
    """Return the smoothed round-trip time of a TCP connection in seconds, from struct tcp_info of Linux."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCPI_RTT.size)
    microseconds: int = TCPI_RTT.unpack(info)[0]
    return microseconds / 1e6
