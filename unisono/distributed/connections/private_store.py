"""A store that only members can reach, for engines whose own store answers every program: torchrun, srun, mpirun.

    engine's store    rank 0 writes the addresses and the port there, and nothing else
    private store     rank 0 serves it: proof of the secret, TLS 1.3, then the protocol of the rendezvous server

A program that changes the engine's store can prevent the start of a run. It cannot take part in it, or read it.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist

from unisono.config.schema import SecureSettings
from unisono.distributed import existing_group
from unisono.distributed.connections.caller import TRY_SECONDS, certificate_error, plain
from unisono.distributed.connections.choose_credentials import choose_credentials, choose_secret, is_private
from unisono.distributed.connections.collective_group import register
from unisono.distributed.process_group import TIMEOUT
from unisono.distributed.rendezvous.own_port import listen, own_addresses
from unisono.distributed.rendezvous.store import RendezvousStore
from unisono.environment import World
from unisono.errors import WorldError
from unisono.handshake.certificates import Credentials, describe, require_name
from unisono.handshake.encrypted_pipe import handshake
from unisono.handshake.member_listener import Member, MemberListener
from unisono.handshake.mutual_proof import PROOF_SECONDS, OtherSecretError, RunSecret, prove
from unisono.json_forms import parse_value
from unisono.security.refusals import REFUSALS

PURPOSE = "store"
"""The kind of port, in proofs."""

WHERE = "private-store"
"""The key of the address in the engine's store."""

MEET_SECONDS = 60.0
"""Time limit for connecting, once rank 0 has opened the port."""

MOST_LINE = 4096
"""Most bytes of the first message of each end."""

HANDSHAKES = 64
"""Most handshakes at a time. With certificates of an organization, every program can begin one."""


def private_store(world: World, secure: SecureSettings, store: dist.Store) -> dist.Store:
    """Let torch make groups with TLS, and return a store that only members of the run can reach. Collective.

    Args:
        world: this process's place in the run.
        secure: the settings.
        store: the store through which the processes find each other.

    Raises:
        WorldError: a file cannot be used, there is no secret that only members have, or rank 0 refuses this process.
    """
    if world.store == existing_group.EXISTING:
        fact = "The script has made it before unisono.main, and its back end sends everything as it is."
        raise WorldError(
            "secure.transport = tls does not encrypt the script's own process group.", fact, existing_group.REMOVE
        )
    make = partial(choose_credentials, world, secure, store)
    credentials = make()
    register(world.host, make)
    if is_private(world):
        return store
    secret = RunSecret() if secure.ca else RunSecret(choose_secret(world, secure, store).derive(b"store"))
    if world.rank == 0:
        server = StoreServer(MemberListener(listen(world.size, here=False), secret, PURPOSE, REFUSALS), credentials)
        at = {"host": world.host, "addresses": own_addresses(), "port": server.port}
        store.set(WHERE, json.dumps(at))
        return RendezvousStore(server.connect(), TIMEOUT, server.connect)
    store.wait([WHERE], TIMEOUT)
    at = json.loads(store.get(WHERE))
    enter = partial(enter_store, at, world.rank, world.host, secret, credentials)
    return RendezvousStore(enter(), TIMEOUT, enter)


def enter_store(at: dict[str, Any], rank: int, host: str, secret: RunSecret, credentials: Credentials) -> socket.socket:
    """Return a connection to the store of rank 0.

    Args:
        at: the host, the addresses and the port of the store.
        rank: the rank of this process.
        host: the name of its host.
        secret: the secret that both ends prove; empty with certificates of an organization.
        credentials: the certificate of this process.

    Raises:
        WorldError: the store cannot be reached, or one end does not accept the other one.
    """
    connection = _reach(at, rank, secret, credentials)
    with _closed_after_error(connection):
        require_name(credentials, connection, [at["host"], connection.getpeername()[0]], _rank_0(at))
        _introduce(connection, rank, host)
    return connection


def _rank_0(at: dict[str, Any]) -> str:
    return f"rank 0 on host {at['host']}"


def _introduce(connection: socket.socket, rank: int, host: str) -> None:
    """State the name of this host, which its certificate must name. Raises WorldError if rank 0 refuses that."""
    connection.sendall(json.dumps({"host": host}).encode() + b"\n")
    refusal = json.loads(_line(connection) or b'{"refused": "it has closed the connection"}')["refused"]
    if refusal:
        do = "look at the certificate of this host: openssl x509 -noout -text -in FILE"
        raise WorldError(f"Rank 0 has refused rank {rank} on host {host}.", str(refusal), do)


def _line(connection: socket.socket) -> bytes:
    """Return the first line that arrives, after which nothing has been sent yet; empty if the connection ends."""
    found = b""
    while not found.endswith(b"\n") and len(found) < MOST_LINE:
        data = connection.recv(MOST_LINE)
        if not data:
            return b""
        found += data
    return found


def _reach(at: dict[str, Any], rank: int, secret: RunSecret, credentials: Credentials) -> ssl.SSLSocket:
    """Connect to the store of rank 0, with TLS."""
    what, until, reason = _rank_0(at), time.monotonic() + MEET_SECONDS, "it has no address"
    while time.monotonic() < until:
        for each in at["addresses"]:
            try:
                connection = socket.create_connection((each, at["port"]), timeout=TRY_SECONDS)
                with _closed_after_error(connection):
                    prove(connection, secret, PURPOSE, rank)
                return handshake(connection, credentials, listens=False)
            except OtherSecretError as error:
                reason = f"{each}, port {at['port']}: {error}"
            except OSError as error:
                if (text := describe(error, what)) is not None:
                    raise certificate_error(text) from None
                reason = f"{each}, port {at['port']}: {error}"
        time.sleep(0.1)
    raise WorldError(
        f"Rank {rank} cannot reach the private store of {what}.",
        f"Within {MEET_SECONDS:g} s the last attempt ended with: {reason}.",
        "unisono doctor; use the same secure.secret_file on all hosts",
    )


@contextlib.contextmanager
def _closed_after_error(connection: socket.socket) -> Any:
    try:
        yield
    except BaseException:
        connection.close()
        raise


class StoreServer:
    """The store of rank 0, in threads of its own: one that accepts, and one for each connection.

    Args:
        door: the port.
        credentials: the certificate of this process.

    Attributes:
        port: the number of the port.
    """

    def __init__(self, door: MemberListener, credentials: Credentials) -> None:
        self.port = door.address[1]
        self._door, self._credentials = door, credentials
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()
        self._handshakes = threading.Semaphore(HANDSHAKES)
        threading.Thread(target=self._accept, name="store", daemon=True).start()

    def connect(self) -> socket.socket:
        """Return a connection for this process itself."""
        near, far = socket.socketpair()
        threading.Thread(target=self._serve, args=(far,), name="store", daemon=True).start()
        return near

    def _accept(self) -> None:
        while True:
            if (member := self._door.accept(60.0)) is None:
                continue
            if self._handshakes.acquire(blocking=False):
                threading.Thread(target=self._admit, args=(member,), name="store", daemon=True).start()
            else:
                member.connection.close()

    def _admit(self, member: Member) -> None:
        refusal, what = "", f"rank {member.number}"
        try:
            address = plain(member.connection.getpeername()[0])
            what = f"rank {member.number} at {address}"
            secured = handshake(member.connection, self._credentials, listens=True)
            secured.settimeout(PROOF_SECONDS)
            host = str(parse_value(_line(secured))["host"])
            try:
                require_name(self._credentials, secured, [host, address], f"rank {member.number} on host {host}")
            except WorldError as error:
                refusal = " ".join(filter(None, error.problems[0][:2]))
                REFUSALS(f"Refused {what}: {refusal}")
            secured.sendall(json.dumps({"refused": refusal}).encode() + b"\n")
            secured.settimeout(None)
        except (OSError, ValueError, LookupError, TypeError) as error:
            text = describe(error, what) if isinstance(error, OSError) else None
            REFUSALS(f"Refused a connection of {what}: {text or error}")
            member.connection.close()
            return
        finally:
            self._handshakes.release()
        if refusal:
            secured.close()
        else:
            self._serve(secured)

    def _serve(self, connection: socket.socket) -> None:
        """Answer the requests of one process, each a line of JSON, until it disconnects or a line is invalid."""
        invalid = (ValueError, LookupError, TypeError)
        with connection, contextlib.suppress(OSError, *invalid), connection.makefile("rb") as lines:
            for line in lines:
                value = self._answer(parse_value(line))
                connection.sendall(json.dumps({"value": value}).encode() + b"\n")

    def _answer(self, request: dict[str, Any]) -> Any:
        op, values = request["op"], self._values
        with self._changed:
            if op == "wait":
                keys = request["keys"]
                found = self._changed.wait_for(lambda: all(key in values for key in keys), request["seconds"])
                return {key: values[key] for key in keys} if found else None
            if op == "check":
                return all(key in values for key in request["keys"])
            if op == "count":
                return len(values)
            answer = _CHANGES[op](values, request)
            self._changed.notify_all()
            return answer


def _set(values: dict[str, str], request: dict[str, Any]) -> None:
    values[request["key"]] = request["value"]


def _add(values: dict[str, str], request: dict[str, Any]) -> int:
    total = int(values.get(request["key"], "0")) + int(request["amount"])
    values[request["key"]] = str(total)
    return total


def _compare_set(values: dict[str, str], request: dict[str, Any]) -> str:
    key, expected = request["key"], request["expected"]
    if values.get(key, expected if expected == "" else None) == expected:
        values[key] = request["value"]
    return values.get(key, expected)


def _delete(values: dict[str, str], request: dict[str, Any]) -> bool:
    return values.pop(request["key"], None) is not None


_CHANGES: dict[str, Callable[[dict[str, str], dict[str, Any]], Any]] = {
    "set": _set,
    "add": _add,
    "compare_set": _compare_set,
    "delete": _delete,
}
