"""The store of rank 0 with TLS: it works as a store of torch, and strangers neither use it nor keep members out."""

from __future__ import annotations

import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest

from tests.authority import Authority
from unisono.config.schema import SecureSettings
from unisono.distributed.connections import private_store
from unisono.distributed.connections.private_store import PURPOSE, StoreServer, enter_store
from unisono.distributed.rendezvous.own_port import listen
from unisono.distributed.rendezvous.store import RendezvousStore
from unisono.environment import World
from unisono.errors import WorldError
from unisono.handshake.certificates import Credentials, organization_credentials, run_credentials
from unisono.handshake.member_listener import MemberListener
from unisono.handshake.mutual_proof import RunSecret, prove

SECRET = RunSecret(b"a secret of the run")
LIMIT = timedelta(seconds=60)


class Served:
    """A server with these credentials, and its clients."""

    def __init__(self, credentials: Credentials, secret: RunSecret) -> None:
        door = MemberListener(listen(512, here=True), secret, PURPOSE, logging.getLogger("unisono").warning)
        self.server, self.secret = StoreServer(door, credentials), secret
        self.clients: list[RendezvousStore] = []

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self.clients:
            client.close()

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.server.port

    def client(self, credentials: Credentials, rank: int = 1, host: str = "b") -> RendezvousStore:
        at = {"host": "a", "addresses": ["127.0.0.1"], "port": self.server.port}
        store = RendezvousStore(enter_store(at, rank, host, self.secret, credentials), LIMIT)
        self.clients.append(store)
        return store


@pytest.fixture
def served() -> Iterator[Served]:
    with Served(run_credentials(SECRET), RunSecret(SECRET.derive(b"store"))) as made:
        yield made


def test_it_is_a_store(served: Served) -> None:
    one, two = served.client(run_credentials(SECRET)), served.client(run_credentials(SECRET), 2)
    own = RendezvousStore(served.server.connect(), LIMIT)
    served.clients.append(own)
    assert [store.add("count", 2) for store in (one, two, own)] == [2, 4, 6]
    one.set("key", bytes(range(256)))
    assert own.get("key") == bytes(range(256))
    assert two.compare_set("new", "", "first") == b"first"
    assert one.compare_set("new", "", "second") == b"first"
    assert one.compare_set("new", "first", "second") == b"second"
    assert (one.check(["key", "new"]), one.check(["no"]), one.num_keys()) == (True, False, 3)
    assert (one.delete_key("key"), one.delete_key("key")) == (True, False)
    threading.Timer(0.3, lambda: one.set("late", "now")).start()
    assert two.get("late") == b"now"
    with pytest.raises(RuntimeError, match="timeout"):
        two.wait(["never"], timedelta(seconds=0.2))


def test_a_clone_has_a_connection_of_its_own(served: Served) -> None:
    """The thread that detects hangs uses one, while the main thread may wait for an answer."""
    store = RendezvousStore(served.server.connect(), LIMIT, served.server.connect)
    answers: list[bytes] = []
    waiting = threading.Thread(target=lambda: answers.append(store.get("late")))
    waiting.start()
    clone = store.clone()
    served.clients += [store, clone]
    clone.set("late", "now")
    waiting.join(10.0)
    assert answers == [b"now"]
    with pytest.raises(NotImplementedError, match="one connection"):
        served.client(run_credentials(SECRET)).clone()


def test_another_secret_is_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_store, "MEET_SECONDS", 1.0)
    served.secret = RunSecret(b"another secret of a run")
    with pytest.raises(WorldError, match="cannot reach the private store of rank 0 on host a"):
        served.client(run_credentials(SECRET))


def test_a_certificate_must_name_the_host(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority = Authority(tmp_path)
    of_a, of_b = (organization_credentials(authority.issue([name])) for name in ("a", "b"))
    with Served(of_a._replace(allowed=("a", "b")), RunSecret()) as served:
        assert served.client(of_b).add("count", 1) == 1
        with pytest.raises(WorldError, match="Rank 0 has refused rank 2 on host c") as caught:
            served.client(of_b, 2, "c")
    assert "its certificate is that of b." in str(caught.value)
    assert "Refused rank 2 at 127.0.0.1: The certificate of rank 2 on host c names another host." in caplog.text


@pytest.mark.ci
def test_strangers_do_not_keep_a_member_out(tmp_path: Path) -> None:
    """2,000 connections that are silent, send garbage, or stop in the middle of TLS, without a secret before it."""
    authority = Authority(tmp_path)
    member = organization_credentials(authority.issue(["b"]))
    with Served(organization_credentials(authority.issue(["a"])), RunSecret()) as served, ExitStack() as stack:
        first = served.client(member)
        first.set("key", "value")
        for number in range(2000):
            try:
                stranger = stack.enter_context(socket.create_connection(served.address, timeout=5.0))
                if number % 4 == 1:
                    stranger.sendall(secrets.token_bytes(10_000))
                elif number % 4 == 2:
                    prove(stranger, RunSecret(), PURPOSE, 1, seconds=2.0)  # it has no secret, and then no certificate
                elif number % 4 == 3:
                    prove(stranger, RunSecret(), PURPOSE, 1, seconds=2.0)
                    stranger.sendall(json.dumps({"op": "set", "key": "key", "value": "changed"}).encode() + b"\n")
            except OSError:
                continue  # closed by the server
        began = time.monotonic()
        assert first.get("key") == b"value"
        assert time.monotonic() - began < 5.0
        assert served.client(member, 2).get("key") == b"value"
        assert time.monotonic() - began < 60.0


@pytest.mark.parametrize("line", [b"[" * 5000 + b"]" * 5000, b"{", b"{}", b"7", b'{"op": "none"}'])
def test_an_invalid_request_of_a_member_ends_only_its_connection(served: Served, line: bytes) -> None:
    """Threads that raise an exception would fail the test: pytest reports them as warnings, which are errors."""
    with served.server.connect() as member:
        member.settimeout(10.0)
        member.sendall(line + b"\n")
        assert member.recv(1) == b""
    other = served.client(run_credentials(SECRET))
    other.set("key", "value")
    assert other.get("key") == b"value"


def test_a_store_that_everyone_reaches_needs_a_secret(tmp_path: Path) -> None:
    world = World(rank=0, size=2, store="env://", folder=str(tmp_path))
    with pytest.raises(WorldError, match="needs a secret or certificates") as caught:
        private_store.private_store(world, SecureSettings(transport="tls"), None)  # type: ignore[arg-type]
    assert "secure.secret_file=FILE" in str(caught.value)
