"""Hosts that each run the same command, with a number: node 0 waits for the others at a port, and they connect to it.

    host a   unisono run train.py --ranks 8 --nodes 2 --node 0 --meet a:29500      the launcher of all processes
    host b   unisono run train.py --ranks 8 --nodes 2 --node 1 --meet a:29500      an agent (host_agent.py)

Each side restarts with the run: after a restart the agents connect again. The port stays open during the run: an agent
that was lost may start again, and its node then has place for processes that replace others.

Both sides prove that they have the secret of the run (handshake/mutual_proof.py), which each reads from a file. So
node 0 accepts no stranger, and an agent takes no orders from one. With a secret the connection is encrypted, by
certificates that are derived from it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from unisono.errors import SettingsError, UnreachableHostError
from unisono.handshake.certificates import run_credentials
from unisono.handshake.encrypted_pipe import encrypt
from unisono.handshake.member_listener import Member, MemberListener
from unisono.handshake.mutual_proof import OtherSecretError, RunSecret, prove
from unisono.launcher.elastic_policy import socket_folder
from unisono.launcher.hosts.host_agent import HostAgent
from unisono.launcher.hosts.host_list import ListedHost
from unisono.launcher.hosts.message_stream import MessageStream
from unisono.launcher.hosts.remote_host import Link

MEET_SECONDS = 300.0
"""Time limit for all nodes to connect."""

WARN_SECONDS = 20.0
"""Seconds after which a side that waits says so."""

RETRY_SECONDS = 0.5

TRY_SECONDS = 10.0
"""Time limit for one attempt to connect."""

PURPOSE = "node"
"""The kind of port, in proofs."""


class MeetingPoint(NamedTuple):
    """Where the nodes of a run meet: the host of node 0, and a port there."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> MeetingPoint:
        """Return the address of `--meet TEXT`: HOST:PORT, or [ADDRESS]:PORT for IPv6. Raises SettingsError."""
        host, colon, port = text.rpartition(":")
        if not colon or not host or not (port.isdecimal() and 0 < int(port) < 1 << 16):
            fact = "It needs a host and a port from 1 to 65535."
            raise SettingsError(f"Invalid value for --meet: {text}", fact, "--meet HOST:29500, where node 0 is")
        return cls(host.removeprefix("[").removesuffix("]"), int(port))

    def __str__(self) -> str:
        return f"{self.host}, port {self.port}"


class SocketLink:
    """The connection to an agent through a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self.reader = self.writer = connection.fileno()

    def say_alive(self) -> None:
        """Send a sign of life to an agent that waits for the start. An error is noticed later."""
        with contextlib.suppress(OSError):
            MessageStream(self.reader, self.writer).send(alive=True)

    def failure(self) -> tuple[str, str]:
        return "The connection has ended.", "look at the output of the command there"

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


class NodeConnector:
    """Wait for the other nodes at the meeting point.

    Args:
        at: the meeting point.
        secret: the secret of the run.
        say: prints a line for the user.
    """

    can_leave_out = False

    @property
    def is_private(self) -> bool:
        return bool(self._secret)

    def __init__(self, at: MeetingPoint, secret: RunSecret, say: Callable[[str], None]) -> None:
        self._at, self._secret, self._say = at, secret, say

    @contextmanager
    def connect(
        self, hosts: Mapping[int, ListedHost], on_return: Callable[[int, Link], None]
    ) -> Iterator[Mapping[int, Link]]:
        """Yield the connections to these nodes, by their number. A node that connects later is passed to `on_return`.

        Raises:
            SettingsError: the port cannot be opened.
            UnreachableHostError: a node does not connect in time.
        """
        links: dict[int, SocketLink] = {}
        began = time.monotonic()
        with MemberListener(self._listen(), self._secret, PURPOSE, self._say) as listener:
            warned = False
            while missing := sorted(hosts.keys() - links.keys()):
                waited = time.monotonic() - began
                names = " and ".join(f"node {number}" for number in missing)
                if waited > MEET_SECONDS:
                    fact = f"At {self._at} it has not connected within {MEET_SECONDS:g} s."
                    do = f"start the same command there with --node {missing[0]}, and look at its output"
                    raise UnreachableHostError(f"Cannot start without {names}.", fact, do)
                if waited > WARN_SECONDS and not warned:
                    warned = True
                    self._say(f"waiting for {names} at {self._at}: has the command been started there?")
                for link in links.values():
                    link.say_alive()
                if (found := accept_member(listener, self._secret, 1.0)) is not None:
                    number, link = found.number, SocketLink(found.connection)
                    stale = links.pop(number, None) if number in hosts else link  # it has started again
                    if number in hosts:
                        links[number] = link
                    if stale is not None:
                        stale.close()
            ended = threading.Event()
            accept = partial(accept_member, listener, self._secret, 1.0)
            waiter = threading.Thread(target=_wait_for_returns, args=(accept, hosts, on_return, ended), daemon=True)
            waiter.start()
            try:
                yield links
            finally:
                ended.set()
                waiter.join()

    def renew(self, host: int) -> bool:
        return False  # it comes back when its command is started again

    def _listen(self) -> socket.socket:
        error = f"Node 0 cannot wait for the others at {self._at}."
        try:
            family, _, _, _, address = socket.getaddrinfo(*self._at, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(1024)
        except OSError as failure:
            do = "--meet ADDRESS:PORT, with an address of node 0 and a free port"
            raise SettingsError(error, f"{failure.strerror or failure}.", do) from None
        return listener


def _wait_for_returns(
    accept: Callable[[], Member | None],
    hosts: Collection[int],
    on_return: Callable[[int, Link], None],
    ended: threading.Event,
) -> None:
    """Pass nodes that connect again to `on_return`, until the run has ended."""
    while not ended.is_set():
        found = accept()
        if found is not None and found.number in hosts and not ended.is_set():
            on_return(found.number, SocketLink(found.connection))
        elif found is not None:
            found.connection.close()


def serve_node(number: int, at: MeetingPoint, secret: RunSecret, say: Callable[[str], None]) -> int:
    """Serve the launcher at the meeting point as node `number`. Return the exit status of the run.

    Raises:
        SettingsError: it has another secret.
        UnreachableHostError: it cannot be reached in time.
    """
    starts_again = False
    while True:
        found = _reach(number, at, secret, say)
        stream = MessageStream(found.connection.fileno(), found.connection.fileno())
        with found.connection, socket_folder() as folder:
            agent = HostAgent(stream, Path(folder), reached_at=(found.peer, found.own))
            status, why = agent.serve()
        if status is None and starts_again and not agent.was_asked:
            continue  # it was still the port of the earlier start
        if status is None:
            say(f"Node {number} has lost node 0 at {at}. Its processes are ended.")
            return 1
        if why:
            say(f"Node {number} is ended, and the run continues without it: {why}.")
        if status >= 0:
            return status
        starts_again = True


def _reach(number: int, at: MeetingPoint, secret: RunSecret, say: Callable[[str], None]) -> ConnectedMember:
    """Connect to the meeting point, and prove the secret to each other, for MEET_SECONDS."""
    began, warned, reason = time.monotonic(), False, ""
    while time.monotonic() - began < MEET_SECONDS:
        try:
            return connect_member(at, secret, PURPOSE, number)
        except OtherSecretError:
            fact = f"Node {number} has {'the one of its --secret-file' if secret else 'none'}."
            do = "--secret-file FILE on all nodes, with the same content, or on none"
            raise SettingsError(f"Node {number} and node 0 at {at} have different secrets.", fact, do) from None
        except OSError as error:
            reason = _reason_of(error)
        if time.monotonic() - began > WARN_SECONDS and not warned:
            warned = True
            say(f"node {number} tries to reach {at}: {reason}")
        time.sleep(RETRY_SECONDS)
    raise UnreachableHostError(
        f"Node {number} cannot reach {at}, within {MEET_SECONDS:g} s.",
        f"The last attempt ended with: {reason}.",
        "start node 0, check the address with which it is reached from here, and let its firewall accept the port",
    )


class ConnectedMember(NamedTuple):
    """A connection to a MemberListener, encrypted if there is a secret.

    Attributes:
        connection: the connection, which blocks.
        peer: the address of the other end.
        own: that of this end.
    """

    connection: socket.socket
    peer: str
    own: str


def connect_member(at: tuple[str, int], secret: RunSecret, purpose: str, number: int) -> ConnectedMember:
    """Connect to a MemberListener, whose end uses `accept_member`.

    Raises:
        OSError: it cannot be reached within TRY_SECONDS, or does not prove that it has the secret.
        SettingsError: there is a secret, and the package cryptography is missing.
    """
    connection = socket.create_connection(at, timeout=TRY_SECONDS)
    try:
        prove(connection, secret, purpose, number)
    except OSError:
        connection.close()
        raise
    connection.settimeout(None)
    peer, own = connection.getpeername()[0], connection.getsockname()[0]
    if secret:
        connection = encrypt(connection, run_credentials(secret), listens=False)
    return ConnectedMember(connection, peer, own)


def accept_member(listener: MemberListener, secret: RunSecret, seconds: float) -> Member | None:
    """Return the next member that has connected, with an encrypted connection if there is a secret.

    Returns:
        None if none connects within this time, or if the connection ends.
    """
    found = listener.accept(seconds)
    if found is None or not secret:
        return found
    try:
        return found._replace(connection=encrypt(found.connection, run_credentials(secret), listens=True))
    except OSError:
        return None  # it connects again


def _reason_of(error: OSError) -> str:
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return "no answer"
    if isinstance(error, socket.gaierror):
        return f"the name does not resolve ({error.strerror})"
    return (error.strerror or (os.strerror(error.errno) if error.errno else str(error))).lower()
