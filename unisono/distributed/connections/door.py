"""Where a process accepts the others of its group: a Unix socket for those of its host, a TCP port for all others.

    | rank r, other host |  --TCP-->   proof of the token, TLS   "go"  |
    | rank r, this host  |  --Unix-->  number and token                | --> admit(r, connection)

The token is in the store of the run. The proof (handshake/mutual_proof.py) comes first: programs that are no members of
the run cost 68 bytes, and reach neither TLS nor a parser. The end that connects says "go" when nothing can fail any
more on its side: until then it may give up and try again.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from unisono.distributed.rendezvous.own_port import listen, own_addresses
from unisono.handshake.member_listener import MemberListener
from unisono.handshake.mutual_proof import PROOF_SECONDS, RunSecret
from unisono.security.refusals import REFUSALS

PURPOSE = "group"
"""The kind of port, in proofs."""

POLL_SECONDS = 0.5
"""How long a closed door keeps its threads at most."""

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

RANK = struct.Struct("!I")

GO = b"\x02"
"""What the end that connects sends last."""


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
            return self.boot == boot_id() and os.stat(self.path).st_uid == os.getuid()
        return False

    def name(self, rank: int) -> str:
        return f"rank {rank} on host {self.host}"


def boot_id() -> str:
    """Return what identifies the running kernel."""
    with contextlib.suppress(OSError):
        return BOOT_ID.read_text().strip()
    return socket.gethostname()


class Door:
    """The sockets at which a process accepts others, and a thread for each.

    Args:
        backlog: how many may connect at the same time.
        host: the name of this host.
        admit: admit(rank, connection, here) takes over a connection whose other end has read the address. `here`: it is
            a Unix socket.

    Attributes:
        address: what the others need to know.
        sockets: those that listen.
    """

    def __init__(self, backlog: int, host: str, admit: Callable[[int, socket.socket, bool], None]) -> None:
        self._admit, self._is_open = admit, True
        self._folder = tempfile.TemporaryDirectory(prefix="unisono-")  # mode 0700
        path = str(Path(self._folder.name, "peers"))
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        unix.bind(path)
        unix.listen(backlog)
        tcp = listen(backlog, here=False)
        self.sockets = (tcp, unix)
        token, port = secrets.token_hex(32), tcp.getsockname()[1]
        self.address = PeerAddress(host, boot_id(), path, own_addresses(), port, token)
        self._secret = RunSecret.from_hex(token)
        self._threads = [
            threading.Thread(target=self._accept_tcp, args=(tcp,), name="door", daemon=True),
            threading.Thread(target=self._accept_unix, args=(unix,), name="door", daemon=True),
        ]

    def open(self) -> None:
        """Begin to accept."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Refuse all connections from now on."""
        self._is_open = False
        for listener in self.sockets:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._folder.cleanup()

    def _accept_tcp(self, listener: socket.socket) -> None:
        with MemberListener(listener, self._secret, PURPOSE, REFUSALS) as door:
            while self._is_open:
                if (member := door.accept(POLL_SECONDS)) is not None:
                    self._admit(member.number, member.connection, False)

    def _accept_unix(self, listener: socket.socket) -> None:
        token = bytes.fromhex(self._secret.hex())
        listener.settimeout(POLL_SECONDS)
        with listener:
            while self._is_open:
                with contextlib.suppress(OSError):
                    connection, _ = listener.accept()
                    connection.settimeout(PROOF_SECONDS)
                    said = connection.recv(RANK.size + len(token), socket.MSG_WAITALL)
                    if secrets.compare_digest(said[RANK.size :], token):
                        self._admit(RANK.unpack_from(said)[0], connection, True)
                    else:
                        connection.close()
