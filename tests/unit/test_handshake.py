"""Members prove a secret to each other; strangers change nothing, whatever they send. Real sockets on loopback."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from unisono.errors import SettingsError
from unisono.handshake import member_listener
from unisono.handshake.member_listener import Member, MemberListener, RefusalLines, plain_address
from unisono.handshake.mutual_proof import (
    ANSWER_BYTES,
    GREETING_BYTES,
    PROOF_BYTES,
    REFUSAL,
    OtherProgramError,
    OtherSecretError,
    RunSecret,
    greeting,
    prove,
)
from unisono.handshake.secret_file import read_secret
from unisono.launcher.hosts import node_link
from unisono.launcher.hosts.host_list import ListedHost
from unisono.launcher.hosts.network.link_probe import LinkProbe, probe
from unisono.launcher.hosts.node_link import MeetingPoint, NodeConnector
from unisono.launcher.hosts.remote_host import Link

SECRET = RunSecret(b"sixteen letters.")
WAIT = 30.0
"""Seconds for what should happen at once."""


class Port:
    """A listener with a thread that collects its members, as a launcher does.

    Args:
        purpose: the kind of port.
        seconds: time limit for a proof.
    """

    def __init__(self, purpose: str = "node", seconds: float = WAIT) -> None:
        self.lines: list[str] = []
        self.members: list[Member] = []
        self.changed = threading.Condition()
        self.ended = threading.Event()
        self.listener = MemberListener(
            socket.create_server(("127.0.0.1", 0), backlog=1024), SECRET, purpose, self.say, seconds
        )
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def say(self, line: str) -> None:
        with self.changed:
            self.lines.append(line)
            self.changed.notify_all()

    def serve(self) -> None:
        with self.listener:
            while not self.ended.is_set():
                member = self.listener.accept(0.05)
                with self.changed:
                    self.members += [member] if member is not None else []
                    self.changed.notify_all()

    def wait_for(self, *, members: int = 0, lines: int = 0) -> None:
        """Wait until there are this many."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.members) >= members and len(self.lines) >= lines, WAIT)

    def connect(self) -> socket.socket:
        return socket.create_connection(self.listener.address, timeout=WAIT)

    def join(self, number: int, purpose: str = "node") -> socket.socket:
        """Connect as a member."""
        connection = self.connect()
        prove(connection, SECRET, purpose, number)
        return connection


@contextmanager
def open_port(purpose: str = "node", seconds: float = WAIT) -> Iterator[Port]:
    port = Port(purpose, seconds)
    try:
        yield port
    finally:
        port.ended.set()
        port.thread.join()
        for member in port.members:
            member.connection.close()


def receive(connection: socket.socket, count: int) -> bytes:
    """Receive this many bytes, or as many as there are before the end."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while len(found) < count and (data := connection.recv(count - len(found))):
            found += data
    return found


def sent_until_error(connection: socket.socket, most: int) -> int:
    """Send up to this many bytes. Return how many there were when the other end reset the connection."""
    part, sent = bytes(1 << 20), 0
    with contextlib.suppress(ConnectionError):
        while sent < most:
            sent += connection.send(part)
    return sent


def answer_to(first: bytes, secret: RunSecret, number: int, role: bytes = b"connects", purpose: str = "node") -> bytes:
    """Return an answer to a greeting, with a nonce of 32 zeros."""
    nonce = bytes(32)
    return number.to_bytes(4) + nonce + secret.proof(role, number, first[-32:], nonce, purpose)


def test_members_get_a_connection_that_blocks_and_their_number() -> None:
    with open_port() as port, port.join(3) as first, port.join(70_000) as second:
        port.wait_for(members=2)
        assert [member.number for member in port.members] == [3, 70_000]
        for connection, member in zip((first, second), port.members, strict=True):
            connection.sendall(b"hello")
            assert (member.connection.recv(5), member.connection.gettimeout()) == (b"hello", None)
            assert connection.gettimeout() == WAIT
        assert port.lines == []


@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/1.1\r\nHost: a\r\nAccept: */*\r\n\r\n" * 9, bytes(ANSWER_BYTES)], ids=["HTTP", "zeros"]
)
def test_garbage_is_refused_with_one_line_that_names_the_address(sent: bytes) -> None:
    with open_port() as port, port.connect() as stranger:
        stranger.sendall(sent)
        found = receive(stranger, 1000)
        assert found[GREETING_BYTES:] in (b"", REFUSAL)  # a reset may discard what was sent
        port.wait_for(lines=1)
        number = port.listener.address[1]
        assert port.lines == [
            f"Refused a connection from 127.0.0.1 to port {number}: what it sends is no proof of the run's secret."
        ]
        port.join(1).close()
        port.wait_for(members=1)


def test_a_recorded_proof_is_of_no_use() -> None:
    with open_port() as port, port.connect() as honest, port.connect() as thief:
        recorded = answer_to(receive(honest, GREETING_BYTES), SECRET, 1)
        honest.sendall(recorded)
        assert len(receive(honest, PROOF_BYTES)) == PROOF_BYTES
        receive(thief, GREETING_BYTES)
        thief.sendall(recorded)
        assert receive(thief, 1000) == REFUSAL
        port.wait_for(members=1, lines=1)
        assert len(port.members) == 1


def test_an_end_cannot_send_back_what_it_has_received() -> None:
    """A stranger uses one port of the run to answer the other: the port proves, but in its own role only."""
    with open_port() as port, port.connect() as stranger, port.connect() as other:
        first = receive(stranger, GREETING_BYTES)
        proof_of_port = answer_to(first, SECRET, 1, role=b"listens")
        stranger.sendall(proof_of_port)
        assert receive(stranger, 1000) == REFUSAL
        first = receive(other, GREETING_BYTES)
        other.sendall(first.ljust(ANSWER_BYTES, b"\0"))  # its own nonce
        assert receive(other, 1000) == REFUSAL
        port.wait_for(lines=1)
        assert port.members == []


def test_a_proof_holds_for_one_number_and_one_kind_of_port() -> None:
    with open_port() as port, port.connect() as first, port.connect() as second:
        wrong = answer_to(receive(first, GREETING_BYTES), SECRET, 1)
        first.sendall((2).to_bytes(4) + wrong[4:])
        assert receive(first, 1000) == REFUSAL
        second.sendall(answer_to(receive(second, GREETING_BYTES), SECRET, 1, purpose="ray"))
        assert receive(second, 1000) == REFUSAL
        assert port.members == []


def test_a_member_with_another_secret_gets_an_error() -> None:
    with open_port() as port, port.connect() as stranger:
        with pytest.raises(OtherSecretError):
            prove(stranger, RunSecret(b"another secret.."), "node")
        port.wait_for(lines=1)
        assert port.members == []


def test_a_port_without_the_secret_is_noticed() -> None:
    """The end that connects takes no orders from a program that does not prove the secret."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def pretend(first: bytes, last: bytes) -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(ConnectionError):  # the other end may have left
                connection.sendall(first)
                receive(connection, ANSWER_BYTES if last else 1)
                connection.sendall(last)

        for first, last, error in (
            (greeting()[0], b"x" * PROOF_BYTES, OtherSecretError),
            (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", b"", OtherProgramError),
            (b"", b"", TimeoutError),
        ):
            thread = threading.Thread(target=pretend, args=(first, last))
            thread.start()
            with socket.create_connection(server.getsockname()) as connection, pytest.raises(error):
                prove(connection, SECRET, "node", seconds=WAIT if first else 0.1)
            thread.join()


def test_a_silent_connection_blocks_no_member_and_is_closed_in_time() -> None:
    with open_port(seconds=0.5) as port, port.connect() as silent, port.connect() as slow, port.join(1):
        port.wait_for(members=1)
        slow.sendall(b"x")  # one byte, and no more in time
        assert len(receive(silent, 1000)) == len(receive(slow, 1000)) == GREETING_BYTES  # and then the end
        port.wait_for(lines=1)
        assert "it has not proved within 0.5 s that it has the run's secret" in port.lines[0]


def test_one_byte_at_a_time_is_read_until_the_limit() -> None:
    with open_port() as port, port.connect() as slow:
        slow.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in answer_to(receive(slow, GREETING_BYTES), SECRET, 9):
            slow.sendall(bytes([byte]))
        port.wait_for(members=1)
        assert port.members[0].number == 9


def test_a_gigabyte_before_the_proof_is_not_read() -> None:
    with open_port() as port, port.connect() as stranger:
        assert sent_until_error(stranger, 1 << 30) < 1 << 28  # what fits into the buffers of both ends, at most
        port.join(1).close()
        port.wait_for(members=1)


def test_two_thousand_connections_leave_room_for_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_listener, "NEW_PER_SECOND", 10_000)
    with open_port() as port:
        for _ in range(4):
            with contextlib.ExitStack() as stack:
                for _ in range(500):
                    stack.enter_context(port.connect())
                port.join(1).close()
        port.wait_for(members=4, lines=1)
        assert len(port.listener._unproven) <= member_listener.UNPROVEN_OF_ADDRESS
        assert len(port.lines) == 1  # one line for one address


def test_a_flood_of_one_address_is_closed_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_listener, "NEW_PER_SECOND", 0)
    with open_port() as port, port.connect() as stranger:
        assert receive(stranger, 1000) == b""
        port.wait_for(lines=1)
        assert "it has too many connections" in port.lines[0]
        monkeypatch.setattr(member_listener, "NEW_PER_SECOND", 10)
        port.join(1).close()
        port.wait_for(members=1)


def test_nodes_meet_among_silent_strangers() -> None:
    """Node 0 waits for two nodes, twenty strangers are there first, and one node has no secret."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        at = MeetingPoint("127.0.0.1", free.getsockname()[1])
    lines: list[str] = []
    found: dict[int, Link] = {}
    returned: list[int] = []
    met, ended, back = threading.Event(), threading.Event(), threading.Event()

    def come_back(number: int, link: Link) -> None:
        returned.append(number)
        link.close()
        back.set()

    def wait() -> None:
        with NodeConnector(at, SECRET, lines.append).connect(
            {1: ListedHost("node-1"), 2: ListedHost("node-2")}, come_back
        ) as links:
            found.update(links)
            met.set()
            assert ended.wait(WAIT)

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        with node_link._reach(1, at, SECRET, lines.append).connection as first, contextlib.ExitStack() as stack:
            for number in range(20):
                stranger = stack.enter_context(socket.create_connection(at))
                stranger.sendall(b'{"node": 2}\n' * (number % 2 * 20))
            with pytest.raises(SettingsError, match="have different secrets"):
                node_link._reach(2, at, RunSecret(), lines.append)
            second, stranger_member = (node_link._reach(n, at, SECRET, lines.append).connection for n in (2, 7))
            with second, stranger_member:
                assert met.wait(WAIT)
            with node_link._reach(1, at, SECRET, lines.append).connection:  # its command was typed again
                assert back.wait(WAIT)
            os.write(found[1].writer, b"order")
            found[1].kill()
            assert receive(first, 10_000).endswith(b"order")  # after signs of life
    finally:
        ended.set()
        thread.join()
        for link in found.values():
            link.close()
    assert (sorted(found), returned) == ([1, 2], [1])
    assert [line.partition(":")[0] for line in lines] == [f"Refused a connection from 127.0.0.1 to port {at.port}"]


def test_a_probe_without_the_token_measures_nothing() -> None:
    lines: list[str] = []
    listening = LinkProbe("127.0.0.1", lines.append)
    try:
        assert probe("127.0.0.1", listening.port, listening.token)["bytes_per_second"] > 0
        assert probe("127.0.0.1", listening.port, "00" * 32) == {"error": "the other end has another secret", "code": 0}
    finally:
        listening.close()
    assert len(lines) == 1


def test_lines_name_an_address_once_and_end_after_some() -> None:
    lines: list[str] = []
    refusals = RefusalLines(29500, lines.append)
    for number in range(2 * member_listener.LINES):
        refusals.add(f"10.0.0.{number}", "why")
        refusals.add(f"10.0.0.{number}", "why")
    assert len(lines) == member_listener.LINES
    assert lines[0] == "Refused a connection from 10.0.0.0 to port 29500: why."
    assert lines[-1].endswith("why. Further addresses are not named for a minute.")


def test_a_host_with_many_ipv6_addresses_counts_as_one() -> None:
    assert plain_address("2001:db8::1") == plain_address("2001:db8::ffff:2") == "2001:db8::/64"
    assert plain_address("::ffff:10.0.0.1") == "10.0.0.1"
    assert plain_address("fe80::1%eth0") == "fe80::1"
    assert plain_address("::1") == "::1"


def test_a_secret_is_not_shown_and_survives_text() -> None:
    assert "sixteen" not in f"{SECRET!r} {SECRET} {[SECRET]}"
    proofs = {secret.proof(b"listens", 1, b"a", b"b", "p") for secret in (SECRET, RunSecret.from_hex(SECRET.hex()))}
    assert len(proofs) == 1
    assert (bool(RunSecret()), bool(RunSecret.random())) == (False, True)


def test_a_secret_file_is_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    with pytest.raises(SettingsError, match="Cannot read the secret file"):
        read_secret(str(path))
    path.write_text("0123456789abcdef\n")
    path.chmod(0o640)
    with pytest.raises(SettingsError, match=r"Other users can read or change .*[\s\S]*its mode is 640[\s\S]*chmod 600"):
        read_secret(str(path))
    path.chmod(0o600)
    assert read_secret(str(path)).hex() == b"0123456789abcdef".hex()
    for content in ("short", "x" * 5000):
        path.write_text(content)
        with pytest.raises(SettingsError, match=r"no usable secret"):
            read_secret(str(path))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(("mode", "group", "is_read"), [(0o440, 7, True), (0o440, 8, False), (0o444, 7, False)])
def test_a_file_of_root_may_be_readable_by_the_own_group(mode: int, group: int, is_read: bool) -> None:
    """Kubernetes mounts a Secret so in a pod with an fsGroup."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        path = Path(folder, "secret")
        path.write_text("0123456789abcdef\n")
        os.chown(path, 0, 7)
        path.chmod(mode)
        Path(folder).chmod(0o711)
        child = os.fork()
        if not child:
            os.setgroups([group])
            os.setuid(65534)
            try:
                os._exit(0 if read_secret(str(path)) else 2)
            except SettingsError:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (0 if is_read else 1)
