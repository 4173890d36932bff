"""The connections of a process to the others of its group: Unix sockets within a host, TCP between hosts, with TLS 1.3
or without.

When a group is made, each process connects to those with which it communicates in small collectives (pairwise.py): all
others if they are few, else about 2 log2(W). All other pairs connect when they first communicate. The process with the
higher rank connects, and the other one accepts:

    rank 1   has a message for rank 2: keeps it         rank 2   wants a message of rank 1: connects    --->  rank 1
             the door accepts rank 2: sends it                   receives it

A message or a receive waits in its stream meanwhile (peer_stream.py), so nothing that the caller does waits for a
connection. While something waits for a process of higher rank, its door is tried every few seconds: the kernel of a
process that has ended refuses, and a host that is gone does not answer.
"""

from __future__ import annotations

import json
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from unisono.distributed.connections.caller import Caller, Identity, certificate_error, plain, tuned
from unisono.distributed.connections.door import GO, Door, PeerAddress
from unisono.distributed.connections.message_loop import LOOP
from unisono.distributed.connections.pairwise import partners
from unisono.distributed.connections.peer_stream import CLOSED, PeerStream
from unisono.distributed.rendezvous.silent_hosts import SILENCE_LIMIT, SILENCE_SECONDS
from unisono.errors import WorldError
from unisono.handshake.certificates import describe, require_name
from unisono.handshake.encrypted_pipe import handshake
from unisono.handshake.mutual_proof import PROOF_SECONDS
from unisono.security.refusals import REFUSALS

LATER_SECONDS = 60.0
"""Time limit for a connection that is opened when it is needed. Its process is alive, but may be starved."""

PROBE_SECONDS = 5.0
"""Seconds between two attempts to reach the door of a process that something waits for."""


class PeerConnections:
    """The connections of this process to the others of one group. Collective.

    Args:
        store: the store through which the processes find each other. With TLS it must be private to the run.
        rank: the rank of this process in the group.
        size: the number of processes.
        limit: how long connecting to the first partners may take.
        identity: what identifies this process to its peers.

    Raises:
        RuntimeError: a process cannot be reached in time.
        WorldError: a certificate is not accepted.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, limit: timedelta, identity: Identity) -> None:
        self._store, self._rank, self._identity = store, rank, identity
        self._caller = Caller(rank, identity)
        self._streams: dict[int, PeerStream] = {}
        self._connected: set[int] = set()
        self._changed = threading.Condition()
        self._refusal: Exception | None = None  # while the first partners connect
        self._error = ""
        self._until = time.monotonic() + limit.total_seconds()
        self._door = Door(size, identity.host, self._admit)
        LOOP.close_in_forks(self._door.sockets)
        _LIVE.add(self)
        try:
            self._connect_first(first := partners(rank, size))
        except BaseException:
            self.close()
            raise
        if len(first) == size - 1:
            self._door.close()
        self._until = float("inf")

    def _connect_first(self, partners: Sequence[int]) -> None:
        self._door.open()
        self._store.set(_key(self._rank), json.dumps(self._door.address))
        for peer in partners:
            if peer < self._rank:
                address = self._address_of(peer)
                self._attach(peer, self._caller.connect(address, peer, self._until, self._is_over), address.name(peer))
        with self._changed:
            over = lambda: self._connected >= {*partners} or self._refusal is not None  # noqa: E731
            self._changed.wait_for(over, max(self._until - time.monotonic(), 0.0))
            missing = {*partners} - self._connected
        if self._refusal is not None:
            raise self._refusal
        if missing:
            raise RuntimeError(f"Timed out waiting for rank {min(missing)} to connect")

    # -- for the group

    def stream(self, peer: int) -> PeerStream:
        """Return the connection to a process, which may be one that has yet to be opened."""
        return self._streams.get(peer) or self._open(peer)

    def fail(self, reason: str) -> None:
        """End all messages of the group with an error, here and at all peers."""
        with self._changed:
            self._error = self._error or reason
            streams = list(self._streams.values())
            self._changed.notify_all()
        self._door.close()
        LOOP.fail(streams, reason)

    def close(self) -> None:
        """Close all connections. Messages in progress fail. Returns when it is done."""
        self.fail(CLOSED)
        LOOP.close(list(self._streams.values()))

    # -- streams

    def _open(self, peer: int) -> PeerStream:
        address = self._address_of(peer)
        with self._changed:
            is_new = peer not in self._streams
            stream = self._stream_of(peer, address.name(peer))
        if is_new:
            body = self._connect_later if peer < self._rank else self._watch
            threading.Thread(target=body, args=(peer, stream, address), name="connect", daemon=True).start()
        return stream

    def _stream_of(self, peer: int, name: str) -> PeerStream:
        """Return the stream of a process, which is made if there is none. The caller has the lock."""
        if peer not in self._streams:
            self._streams[peer] = stream = PeerStream(name)
            LOOP.add([stream])
            if self._error:
                LOOP.fail([stream], self._error)
        return self._streams[peer]

    def _is_over(self) -> bool:
        return bool(self._error)

    def _attach(self, peer: int, connection: socket.socket, name: str) -> None:
        with self._changed:
            stream = self._stream_of(peer, name)
            is_first = peer not in self._connected and not self._error
            if is_first:
                self._connected.add(peer)
                LOOP.attach(stream, connection)
                self._changed.notify_all()
        if not is_first:
            connection.close()

    def _address_of(self, peer: int) -> PeerAddress:
        key, seconds = _key(peer), min(max(self._until - time.monotonic(), 0.001), LATER_SECONDS)
        self._store.wait([key], timedelta(seconds=seconds))
        found = json.loads(self._store.get(key))
        if not isinstance(found, list) or len(found) != len(PeerAddress._fields):
            raise WorldError(f"Rank {peer} has written no address to the store.", "Its version of Unisono may differ.")
        return PeerAddress(*found)

    # -- the end that accepts

    def _admit(self, peer: int, connection: socket.socket, here: bool) -> None:
        """Take over a connection whose other end has read the address of this process."""
        if peer <= self._rank:  # it has looked whether this process is alive
            connection.close()
            return
        try:
            address = self._address_of(peer)
            accepted = connection if here else self._accept(connection, peer, address)
        except (WorldError, RuntimeError) as error:
            connection.close()
            self._refuse(peer, error)
        except OSError as error:
            connection.close()
            if (text := describe(error, address.name(peer))) is not None:
                self._refuse(peer, certificate_error(text))
        else:
            self._attach(peer, accepted, address.name(peer))
            self._limit_silence()

    def _accept(self, connection: socket.socket, peer: int, address: PeerAddress) -> socket.socket:
        """Encrypt a connection, and wait until its other end is ready. Raises OSError or WorldError."""
        seconds = min(max(self._until - time.monotonic(), 0.001), PROOF_SECONDS)
        credentials, host, accepted = self._identity.credentials, connection.getpeername()[0], connection
        connection.settimeout(seconds)
        if credentials is not None:
            accepted = secured = handshake(connection, credentials, listens=True, seconds=seconds)
            require_name(credentials, secured, [address.host, plain(host)], address.name(peer))
            accepted.settimeout(seconds)
        if accepted.recv(1) != GO:
            raise ConnectionResetError("the other end has closed the connection")
        return tuned(accepted)

    def _refuse(self, peer: int, error: Exception) -> None:
        REFUSALS(f"Refused a connection of rank {peer}: {' '.join(' '.join(str(error).splitlines()[:2]).split())}")
        with self._changed:
            self._refusal = self._refusal or error
            self._changed.notify_all()
        if peer in self._streams:
            LOOP.fail([self._streams[peer]], f"{str(error).splitlines()[0]} {CLOSED}")

    # -- the end that connects

    def _connect_later(self, peer: int, stream: PeerStream, address: PeerAddress) -> None:
        """Connect to a process of lower rank that something waits for."""
        try:
            connection = self._caller.connect(address, peer, time.monotonic() + LATER_SECONDS, self._is_over)
            self._attach(peer, connection, address.name(peer))
        except (RuntimeError, WorldError) as error:
            LOOP.fail([stream], f"{str(error).splitlines()[0]} {CLOSED}")
        else:
            self._limit_silence()

    def _watch(self, peer: int, stream: PeerStream, address: PeerAddress) -> None:
        """End what waits for a process of higher rank if that does not connect, because it is gone."""
        answered = time.monotonic()
        over = lambda: peer in self._connected or bool(self._error)  # noqa: E731
        while True:
            with self._changed:
                if self._changed.wait_for(over, PROBE_SECONDS):
                    return
            try:
                self._caller.probe(address)
                answered = time.monotonic()
            except (ConnectionRefusedError, FileNotFoundError) as error:
                LOOP.fail([stream], f"{error.strerror}. {CLOSED}")
                return
            except OSError as error:
                if time.monotonic() - answered > SILENCE_SECONDS:
                    LOOP.fail([stream], f"{error.strerror or error}. {CLOSED}")
                    return

    def _limit_silence(self) -> None:
        """Watch the host at the other end of a connection that was opened after the group was made."""
        if self._until == float("inf"):
            SILENCE_LIMIT.add()


_LIVE: weakref.WeakSet[PeerConnections] = weakref.WeakSet()


def fail_all(reason: str) -> None:
    """End all messages of all groups of this process with an error."""
    for connections in tuple(_LIVE):
        connections.fail(reason)


def _key(rank: int) -> str:
    """Return the key of a process's address. The rendezvous server answers with all keys of this form at once."""
    return f"tls//peers//0/{rank}"
