"""Connect the processes of a group in pairs: a Unix socket within a host, TLS 1.3 over TCP between hosts.

    rank 1   opens a port, writes address and token to the store  <--- rank 2: reads them, connects, proves the token,
             accepts, checks the proof, TLS handshake             ---> TLS handshake
             checks the name in the certificate                   ---> checks the name in the certificate

Each process connects to those of lower ranks, and accepts those of higher ranks. The proof (handshake/mutual_proof.py)
comes first: programs that are no members of the run cost 68 bytes, and reach neither TLS nor a parser.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import ssl
import struct
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from unisono.distributed.encrypted.peer_stream import PeerStream
from unisono.distributed.rendezvous.own_port import listen, own_addresses
from unisono.errors import WorldError
from unisono.handshake.certificates import Credentials, describe, require_name
from unisono.handshake.encrypted_pipe import handshake
from unisono.handshake.member_listener import MemberListener
from unisono.handshake.mutual_proof import PROOF_SECONDS, RunSecret, prove

PURPOSE = "group"
"""The kind of port, in proofs."""

TRY_SECONDS = 3.0
"""Time limit for one of several addresses of a host, in seconds."""

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_log = logging.getLogger("unisono")
_RANK = struct.Struct("!I")


class PeerAddress(NamedTuple):
    """Where a process accepts the others of its group.

    Attributes:
        host: the name of its host.
        boot: identifies the running kernel.
        path: its Unix socket.
        addresses: those of its host, the best one first.
        port: its TCP port.
        token: what proves that the other end has read this, in hexadecimal digits.
    """

    host: str
    boot: str
    path: str
    addresses: list[str]
    port: int
    token: str

    def is_here(self) -> bool:
        """Return whether this process can use the Unix socket: it is on the same host, with the same files and user."""
        with contextlib.suppress(OSError):
            return self.boot == _boot_id() and os.stat(self.path).st_uid == os.getuid()
        return False

    def name(self, rank: int) -> str:
        return f"rank {rank} on host {self.host}"


def _boot_id() -> str:
    with contextlib.suppress(OSError):
        return BOOT_ID.read_text().strip()
    return socket.gethostname()


def connect_peers(
    store: dist.Store, rank: int, size: int, limit: timedelta, credentials: Credentials, host: str
) -> dict[int, PeerStream]:
    """Connect to all other processes of a group. Collective.

    Args:
        store: the store through which the processes find each other. It must be private to the run.
        rank: the rank of this process in the group.
        size: the number of processes.
        limit: how long connecting may take.
        credentials: the certificate of this process, and what it demands of others.
        host: the name of this host.

    Returns:
        {rank: stream}

    Raises:
        RuntimeError: a process cannot be reached in time.
        WorldError: a certificate is not accepted.
    """
    until = time.monotonic() + limit.total_seconds()
    with ExitStack() as stack:
        door = stack.enter_context(_open_door(size, host))
        store.set(_key(rank), json.dumps(door.address))
        accepted = _Acceptor(door, rank, size, store, credentials, until)
        stack.callback(accepted.close)
        opened: dict[int, PeerStream] = {}
        try:
            for peer in range(rank):
                address = _address_of(store, peer, until)
                opened[peer] = PeerStream(_connect(address, peer, rank, credentials, until), address.name(peer))
            return opened | accepted.streams()
        except BaseException:
            close_all([*opened.values(), *accepted.found.values()])
            raise


def _key(rank: int) -> str:
    """Return the key of a process's address. The rendezvous server answers with all keys of this form at once."""
    return f"tls//peers//0/{rank}"


def _address_of(store: dist.Store, rank: int, until: float) -> PeerAddress:
    store.wait([_key(rank)], timedelta(seconds=max(until - time.monotonic(), 0.001)))
    found = json.loads(store.get(_key(rank)))
    if not isinstance(found, list) or len(found) != len(PeerAddress._fields):
        raise WorldError(f"Rank {rank} has written no address to the store.", "Its version of Unisono may differ.")
    return PeerAddress(*found)


# -- the end that accepts


class _Door(NamedTuple):
    """The sockets at which a process accepts others, and their address."""

    tcp: socket.socket
    unix: socket.socket
    address: PeerAddress


@contextmanager
def _open_door(size: int, host: str) -> Iterator[_Door]:
    with tempfile.TemporaryDirectory(prefix="unisono-") as folder, ExitStack() as stack:  # mode 0700
        path = str(Path(folder, "peers"))
        unix = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        unix.bind(path)
        unix.listen(size)
        tcp = stack.enter_context(listen(size, here=False))
        port, token = tcp.getsockname()[1], secrets.token_hex(32)
        yield _Door(tcp, unix, PeerAddress(host, _boot_id(), path, own_addresses(), port, token))


class _Acceptor:
    """Accept the processes of higher ranks, in two threads.

    Attributes:
        found: the connections so far, by rank.
    """

    def __init__(
        self, door: _Door, rank: int, size: int, store: dist.Store, credentials: Credentials, until: float
    ) -> None:
        self._store, self._credentials, self._until = store, credentials, until
        self._secret = RunSecret.from_hex(door.address.token)
        self._changed = threading.Condition()
        self._missing = set(range(rank + 1, size))
        self.found: dict[int, PeerStream] = {}
        self._error: Exception | None = None
        self._ended = False
        self._threads = []
        if self._missing:
            for target, listener in ((self._accept_tcp, door.tcp), (self._accept_unix, door.unix)):
                self._threads.append(threading.Thread(target=target, args=(listener,), daemon=True))
                self._threads[-1].start()

    def streams(self) -> dict[int, PeerStream]:
        """Return the accepted connections, when all are there."""
        with self._changed:
            over = lambda: not self._missing or self._error is not None  # noqa: E731
            self._changed.wait_for(over, max(self._until - time.monotonic(), 0.0))
        if self._error is not None:
            raise self._error
        if self._missing:
            raise RuntimeError(f"Timed out waiting for rank {min(self._missing)} to connect")
        return self.found

    def close(self) -> None:
        self._ended = True
        for thread in self._threads:
            thread.join()

    def _is_accepting(self) -> bool:
        return bool(self._missing) and not self._ended and self._error is None

    def _accept_tcp(self, listener: socket.socket) -> None:
        with MemberListener(listener, self._secret, PURPOSE, _log.warning) as door:
            while self._is_accepting():
                if (member := door.accept(0.1)) is not None:
                    self._admit(member.number, member.connection)

    def _accept_unix(self, listener: socket.socket) -> None:
        listener.settimeout(0.1)
        while self._is_accepting():
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                connection.settimeout(PROOF_SECONDS)
                expected = len(bytes.fromhex(self._secret.hex())) + _RANK.size
                said = connection.recv(expected, socket.MSG_WAITALL)
                if secrets.compare_digest(said[_RANK.size :], bytes.fromhex(self._secret.hex())):
                    (rank,) = _RANK.unpack_from(said)
                    self._keep(rank, PeerStream(connection, f"rank {rank} on this host"))
                else:
                    connection.close()

    def _admit(self, rank: int, connection: socket.socket) -> None:
        """Encrypt a connection whose other end has proved that it has read the store."""
        try:
            address = _address_of(self._store, rank, self._until)
            host, limit = connection.getpeername()[0], max(self._until - time.monotonic(), 0.001)
            secured = handshake(connection, self._credentials, listens=True, seconds=limit)
            require_name(self._credentials, secured, [address.host, plain(host)], address.name(rank))
        except WorldError as error:
            self._fail(error)
        except OSError as error:
            connection.close()
            if (text := describe(error, address.name(rank))) is not None:
                self._fail(certificate_error(text))
        except RuntimeError as error:
            self._fail(error)
        else:
            self._keep(rank, PeerStream(_tuned(secured), address.name(rank)))

    def _keep(self, rank: int, stream: PeerStream) -> None:
        with self._changed:
            if rank in self._missing:
                self._missing.remove(rank)
                self.found[rank] = stream
                self._changed.notify_all()
            else:
                stream.socket.close()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()


def plain(address: str) -> str:
    """Return an IPv4 address as such that a socket for both versions has reported."""
    return address.removeprefix("::ffff:")


def certificate_error(text: str) -> WorldError:
    """Return the error for what certificates.describe has said."""
    error, _, facts = text.partition(": ")
    do = "look at the dates and the issuer there: openssl x509 -noout -subject -issuer -dates -in FILE"
    return WorldError(f"{error}.", f"{facts[:1].upper()}{facts[1:]}", do)


# -- the end that connects


def _connect(address: PeerAddress, peer: int, rank: int, credentials: Credentials, until: float) -> socket.socket:
    """Connect to a process, and return the connection."""
    if address.is_here():
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(max(until - time.monotonic(), 0.001))
        connection.connect(address.path)
        connection.sendall(_RANK.pack(rank) + bytes.fromhex(address.token))
        return connection
    reason = "it has no address"
    while time.monotonic() < until:
        for each in address.addresses:
            try:
                return _connect_to(each, address, peer, rank, credentials, until)
            except OSError as error:
                if (text := describe(error, address.name(peer))) is not None:
                    raise certificate_error(text) from None
                reason = f"{each}, port {address.port}: {error}"
        time.sleep(0.05)
    raise RuntimeError(f"Timed out waiting for {address.name(peer)}: {reason}")


def _connect_to(
    at: str, address: PeerAddress, peer: int, rank: int, credentials: Credentials, until: float
) -> socket.socket:
    """Connect to one address of a process. Raises OSError or WorldError."""
    seconds = max(min(TRY_SECONDS, until - time.monotonic()), 0.001)
    connection = socket.create_connection((at, address.port), timeout=seconds)
    try:
        prove(connection, RunSecret.from_hex(address.token), PURPOSE, rank, seconds)
        limit = max(until - time.monotonic(), 0.001)
        secured = handshake(connection, credentials, listens=False, seconds=limit)
        require_name(credentials, secured, [address.host, at], address.name(peer))
    except BaseException:
        connection.close()
        raise
    return _tuned(secured)


def _tuned(connection: ssl.SSLSocket) -> ssl.SSLSocket:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def close_all(streams: Sequence[PeerStream]) -> None:
    """Close connections that no thread uses yet."""
    for stream in streams:
        stream.socket.close()
