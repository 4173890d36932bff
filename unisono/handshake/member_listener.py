"""Accept connections at a port from members of a run only, while any number of strangers connects.

    member ────▶ ┐  one selector, non-blocking   ┌ proof right ───▶ accept() returns number and connection
    silent ────▶ ├─ at most 68 bytes read of each ┤
    flood  ────▶ ┘  before its proof             └ wrong, late, too many ───▶ closed, one line with the address

No connection waits for another one. Before its proof a connection costs a descriptor and a hundred bytes, for
PROOF_SECONDS at most. When there are too many of these, the oldest is closed: a member answers within a round trip, a
stranger that holds connections does not.
"""

from __future__ import annotations

import contextlib
import ipaddress
import selectors
import socket
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from unisono.handshake.mutual_proof import ANSWER_BYTES, PROOF_SECONDS, REFUSAL, RunSecret, check_answer, greeting

UNPROVEN, UNPROVEN_OF_ADDRESS = 256, 64
"""Most connections without a proof at a time: of all addresses, and of one."""

NEW_PER_SECOND = 200
"""Most connections of one address that are answered in a second. Others are closed at once."""

LINE_SECONDS = 60.0
"""An address is named at most once in this time."""

LINES = 20
"""Most addresses that are named in this time."""

PAUSE_SECONDS = 0.05
"""Pause when the system has no descriptor left."""

WRONG = "what it sends is no proof of the run's secret"
LATE = "it has not proved within {:g} s that it has the run's secret"
ENDED = "it has ended without a proof of the run's secret"
MANY = "it has too many connections without a proof of the run's secret"


class Member(NamedTuple):
    """A connection whose other end has proved that it has the secret, and the number that it states."""

    number: int
    connection: socket.socket


class Unproven:
    """A connection before its proof.

    Args:
        connection: the connection, not blocking.
        address: the address of its other end.
        until: when it is closed.
    """

    def __init__(self, connection: socket.socket, address: str, until: float) -> None:
        self.connection, self.address, self.until = connection, address, until
        first, self.nonce = greeting()
        self.received = b""
        self.connection.send(first)


class RefusalLines:
    """Report connections that are refused, in few lines.

    Args:
        port: the port.
        say: prints a line.
    """

    def __init__(self, port: int, say: Callable[[str], None]) -> None:
        self._port, self._say = port, say
        self._named: dict[str, float] = {}  # when each address was named

    def add(self, address: str, reason: str) -> None:
        """Name an address, unless it was named a moment ago."""
        now = time.monotonic()
        self._named = {each: at for each, at in self._named.items() if now - at < LINE_SECONDS}
        if address in self._named or len(self._named) >= LINES:
            return
        self._named[address] = now
        last = " Further addresses are not named for a minute." if len(self._named) == LINES else ""
        self._say(f"Refused a connection from {address} to port {self._port}: {reason}.{last}")


class MemberListener:
    """A port that only members of a run can use.

    Args:
        listener: a socket that listens. It belongs to this object from now on.
        secret: the secret of the run.
        purpose: the kind of port.
        say: prints a line about connections that are refused.
        seconds: time limit for a proof.

    Attributes:
        address: the address and the port of the socket.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: RunSecret,
        purpose: str,
        say: Callable[[str], None],
        seconds: float = PROOF_SECONDS,
    ) -> None:
        self._listener, self._secret, self._purpose, self._seconds = listener, secret, purpose, seconds
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self._lines = RefusalLines(self.address[1], say)
        self._unproven: dict[socket.socket, Unproven] = {}  # the oldest first
        self._of_address: Counter[str] = Counter()
        self._new: Counter[str] = Counter()  # in this second, by address
        self._second = 0
        self._members: deque[Member] = deque()
        listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> MemberListener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def accept(self, seconds: float) -> Member | None:
        """Return the next member that has connected, with a blocking connection; None if none does within this time."""
        until = time.monotonic() + seconds
        while not self._members:
            deadlines = [until, *(each.until for each in list(self._unproven.values())[:1])]
            for key, _ in self._selector.select(max(0.0, min(deadlines) - time.monotonic())):
                if key.fileobj is self._listener:
                    self._admit()
                elif key.fileobj in self._unproven:  # it may have been closed in this iteration
                    self._read(self._unproven[key.fileobj])
            now = time.monotonic()
            for each in [each for each in self._unproven.values() if each.until <= now]:
                self._refuse(each, LATE.format(self._seconds))
            if now >= until:
                break
        return self._members.popleft() if self._members else None

    def close(self) -> None:
        """Close the port, and all connections that `accept` has not returned."""
        self._selector.close()
        for connection in (self._listener, *self._unproven, *(member.connection for member in self._members)):
            connection.close()
        self._unproven.clear()
        self._members.clear()

    def _admit(self) -> None:
        """Accept a connection, and send the greeting."""
        try:
            connection, name = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # it has ended meanwhile, or there is no descriptor left: accept(2)
            if self._unproven:
                self._refuse(next(iter(self._unproven.values())), MANY)
            else:
                time.sleep(PAUSE_SECONDS)
            return
        address, now = plain_address(name[0]), time.monotonic()
        if int(now) != self._second:
            self._second = int(now)
            self._new.clear()
        self._new[address] += 1
        if self._new[address] > NEW_PER_SECOND:
            connection.close()
            self._lines.add(address, MANY)
            return
        connection.setblocking(False)
        try:
            unproven = Unproven(connection, address, now + self._seconds)
        except OSError:
            connection.close()
            self._lines.add(address, ENDED)
            return
        self._unproven[connection] = unproven
        self._of_address[address] += 1
        self._selector.register(connection, selectors.EVENT_READ)
        self._limit(address)

    def _limit(self, address: str) -> None:
        """Close the oldest connection of an address, or of all, if there are too many."""
        if self._of_address[address] > UNPROVEN_OF_ADDRESS:
            self._refuse(next(each for each in self._unproven.values() if each.address == address), MANY)
        elif len(self._unproven) > UNPROVEN:
            self._refuse(next(iter(self._unproven.values())), MANY)

    def _read(self, unproven: Unproven) -> None:
        """Read what has arrived, and check the proof when it is whole."""
        try:
            data = unproven.connection.recv(ANSWER_BYTES - len(unproven.received))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        unproven.received += data
        if not data:
            self._refuse(unproven, ENDED)
        elif len(unproven.received) == ANSWER_BYTES:
            checked = check_answer(self._secret, self._purpose, unproven.nonce, unproven.received)
            with contextlib.suppress(OSError):  # a member that has ended is noticed by its caller
                unproven.connection.send(REFUSAL if checked is None else checked[1])
            if checked is None:
                self._refuse(unproven, WRONG)
                return
            self._forget(unproven)
            unproven.connection.settimeout(None)
            self._members.append(Member(checked[0], unproven.connection))

    def _refuse(self, unproven: Unproven, reason: str) -> None:
        self._forget(unproven)
        unproven.connection.close()
        self._lines.add(unproven.address, reason)

    def _forget(self, unproven: Unproven) -> None:
        self._selector.unregister(unproven.connection)
        del self._unproven[unproven.connection]
        self._of_address[unproven.address] -= 1
        if not self._of_address[unproven.address]:
            del self._of_address[unproven.address]


def plain_address(text: str) -> str:
    """Return an address as it is counted: IPv4 as such, IPv6 as its network of 64 bits, which one host may own."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    if address.is_loopback or address.is_link_local:
        return str(address)
    return str(ipaddress.ip_network((int(address), 64), strict=False))
