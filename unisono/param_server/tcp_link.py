"""Links: connections between two processes each, which fail independently of each other.

When a process of a torch group dies, the collectives of the others fail. Processes that continue without it use links
instead. A message is one line of JSON, and tensors:

    | 8 bytes: length of the JSON | {"push": 17, ..., "tensors": [["float32", [128, 64]], ...]} | tensors |

Tensors have the layout of tensors/flat.py.

Nothing that arrives is unpickled. When a process dies for any reason, the operating system closes its connections. A
process that hangs keeps them, and only its peer waits for it. A lost host is detected after half a minute (TCP
keepalive).
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from unisono.distributed.backends.backend_choice import TLS
from unisono.distributed.connections.collective_group import own_credentials
from unisono.distributed.process_group import ProcessGroup
from unisono.distributed.rendezvous.own_port import listen, own_addresses
from unisono.errors import WorldError
from unisono.handshake.certificates import Credentials
from unisono.handshake.encrypted_pipe import encrypt
from unisono.handshake.member_listener import MemberListener
from unisono.handshake.mutual_proof import RunSecret, prove
from unisono.security.refusals import REFUSALS
from unisono.tensors.flat import ALIGNMENT, FlatTensors, size_of
from unisono.tensors.spec import TensorSpec

MEET_SECONDS = 60.0
"""Time limit for connecting, once all processes have started, in seconds."""

TRY_SECONDS = 3.0
"""Time limit for connecting to one of several addresses of a host, in seconds."""

PURPOSE = "server"
"""The kind of port, in proofs."""

_head = struct.Struct("!Q")


class TcpLink:
    """A connection to one other process. One thread may send while another receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = threading.Lock()
        connection.settimeout(None)

    def send(self, about: Mapping[str, Any], tensors: Sequence[torch.Tensor] = ()) -> None:
        """Send a JSON object, and tensors. Raises ConnectionError if the other process is gone."""
        with self._sending:
            self._socket.sendall(_packed(about, tensors))

    def tell(self, about: Mapping[str, Any]) -> None:
        """Send a short message if that does not block. A process that hangs or is gone does not get it."""
        if self._sending.acquire(blocking=False):
            try:
                with contextlib.suppress(OSError):
                    self._socket.send(bytes(_packed(about, ())), socket.MSG_DONTWAIT)
            finally:
                self._sending.release()

    def receive(self) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """Return the next message, with tensors in CPU memory. Raises ConnectionError if the other process is gone."""
        (length,) = _head.unpack(self._read(_head.size).numpy().tobytes())
        about = json.loads(self._read(length).numpy().tobytes())
        specs = [TensorSpec.from_json(item) for item in about.pop("tensors")]
        return about, FlatTensors(specs, self._read(size_of(specs))).views()

    def has_word(self) -> bool:
        """Return whether a message has arrived, or the other process is gone."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def close(self) -> None:
        """Close the connection, which ends every wait on either end. A second call has no effect."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, size: int) -> torch.Tensor:
        buffer = torch.empty(size, dtype=torch.uint8)
        view = memoryview(buffer.numpy().data)
        while view:
            count = self._socket.recv_into(view)
            if not count:
                raise ConnectionError("Connection closed by peer")
            view = view[count:]
        return buffer


def _packed(about: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> memoryview:
    """Return a message as bytes."""
    specs = [TensorSpec.of(tensor) for tensor in tensors]
    header = json.dumps({**about, "tensors": specs}).encode()
    header += b" " * (-(_head.size + len(header)) % ALIGNMENT)  # the tensors begin at an aligned offset
    start = _head.size + len(header)
    message = torch.empty(start + size_of(specs), dtype=torch.uint8)
    view = memoryview(message.numpy().data)
    view[:start] = _head.pack(len(header)) + header
    FlatTensors(specs, message[start:]).fill(tensors)
    return view


# -- connecting


def build_links(group: ProcessGroup, servers: int) -> dict[int, TcpLink]:
    """Connect servers and workers, with TLS if the group has it. All processes of the group call this.

    Servers listen only on this host if all processes are on it. They accept connections that prove the server's secret
    (handshake/mutual_proof.py), which only the group has.

    Returns:
        {rank: link}. The first server has links to all processes, another server to the first one and every worker, a
        worker to every server.
    """
    hosts = group.all_gather_object(socket.gethostname())
    here = len(set(hosts)) == 1
    credentials = own_credentials() if group.backend == TLS and not here else None
    if group.rank < servers:
        secret = RunSecret.random()
        with MemberListener(listen(group.size, here=here), secret, PURPOSE, REFUSALS) as door:
            addresses = ["127.0.0.1"] if here else own_addresses()
            doors = group.all_gather_object({"addresses": addresses, "port": door.address[1], "secret": secret.hex()})
            first = {} if group.rank == 0 else {0: _enter(0, doors[0], group.rank, credentials)}
            return first | _let_in(door, set(range(1 if group.rank == 0 else servers, group.size)), credentials)
    doors = group.all_gather_object(None)[:servers]
    return {rank: _enter(rank, about, group.rank, credentials) for rank, about in enumerate(doors)}


def _let_in(door: MemberListener, expected: set[int], credentials: Credentials | None) -> dict[int, TcpLink]:
    links: dict[int, TcpLink] = {}
    deadline = time.monotonic() + MEET_SECONDS
    while expected:
        member = door.accept(max(deadline - time.monotonic(), 0.01))
        if member is None:
            raise WorldError(
                f"{len(expected)} processes did not connect to a server.",
                f"Rank {min(expected)} has not connected within {MEET_SECONDS:g} seconds.",
                "unisono doctor; on several networks, name one that all hosts share: GLOO_SOCKET_IFNAME=eth0 ...",
            )
        if member.number in expected:
            with contextlib.suppress(OSError):  # after an error it connects again
                links[member.number] = TcpLink(_secured(member.connection, credentials, listens=True))
                expected.remove(member.number)
        else:
            member.connection.close()
    return dict(sorted(links.items()))


def _enter(server: int, about: Mapping[str, Any], rank: int, credentials: Credentials | None) -> TcpLink:
    deadline, error = time.monotonic() + MEET_SECONDS, OSError("no address")
    secret = RunSecret.from_hex(about["secret"])
    while time.monotonic() < deadline:
        for address in about["addresses"]:
            try:
                connection = socket.create_connection((address, about["port"]), timeout=TRY_SECONDS)
            except OSError as caught:
                error = caught
                continue
            try:
                prove(connection, secret, PURPOSE, rank)
                return TcpLink(_secured(connection, credentials, listens=False))
            except OSError as caught:
                connection.close()
                error = caught
        time.sleep(0.1)
    raise WorldError(
        f"Rank {rank} cannot connect to the server on rank {server}.",
        f"It is not reachable at {' or '.join(about['addresses'])}, port {about['port']}: {error}",
        "unisono doctor; on several networks, name one that all hosts share: GLOO_SOCKET_IFNAME=eth0 ...",
    ) from error


def _secured(connection: socket.socket, credentials: Credentials | None, *, listens: bool) -> socket.socket:
    """Return a new TCP connection with TLS, or the same one if there are no credentials. Raises OSError."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection if credentials is None else encrypt(connection, credentials, listens=listens)
