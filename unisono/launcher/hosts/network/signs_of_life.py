"""Signs of life that hosts send to each other, to find hosts that reach the launcher and not each other.

    agent on a ◀── one small UDP packet a second ──▶ agent on b
         ╚═ "b has been silent for 0.4 s" ═▶ launcher ◀═ "a has been silent for 11 s" ═╝

Only a host that has been heard once can become silent. So a firewall that drops all UDP packets ends no run.

    | sender, 4 bytes | receiver, 4 bytes | count, 8 bytes | HMAC-SHA256 of these with the token, 32 bytes |

The count grows, so a recorded packet is of no use. Each host has a socket of its own, connected to its address: a flood
from other addresses fills the buffer of another socket.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

ALIVE_SECONDS = 1.0
"""Seconds between two signs of life, in each direction."""

SILENCE_SECONDS = 10.0
"""Seconds without a sign of life after which the other end of a connection counts as gone."""

MOST_PACKETS = 200
"""Most packets that are read from a socket at once, so that a flood does not keep the agent from its work."""

_HEAD = struct.Struct("!IIQ")
_PROOF_BYTES = 32


class SignsOfLife:
    """Sends packets to the other hosts of a run, and notes when packets of them arrive.

    Args:
        address: an address of this host. The other hosts send to it, at a free port.

    Attributes:
        port: the port.

    Raises:
        OSError: this host does not have the address.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._socket = _bound(address, 0)
        self.port = int(self._socket.getsockname()[1])
        self._connected: dict[int, socket.socket] = {}
        self._others: dict[int, tuple[str, int]] = {}
        self._own, self._token = -1, b""
        self._count = time.time_ns()  # above that of an earlier process
        self._counts: dict[int, int] = {}  # of the latest packet of each host
        self._heard: dict[int, float] = {}
        self._sent = 0.0

    def watch(self, own: int, token: str, others: Mapping[Any, Any]) -> None:
        """Exchange packets with these hosts from now on.

        Args:
            own: the number of this host.
            token: a secret of the run. Packets without it do not count.
            others: address and port of each other host, by its number.
        """
        places = {int(number): (str(address), int(port)) for number, (address, port) in others.items()}
        for number in [each for each in self._others if places.get(each) != self._others[each]]:
            self._heard.pop(number, None)  # it has started again
            self._counts.pop(number, None)
            if number in self._connected:
                self._connected.pop(number).close()
        self._own, self._token, self._others = own, token.encode(), places
        for number in places.keys() - self._connected.keys():
            with contextlib.suppress(OSError):  # no route: its packets would arrive at the socket for all
                self._connected[number] = _bound(self._address, self.port, places[number])

    def exchange(self, now: float) -> None:
        """Read the packets that have arrived, and send one to each host if it is time. Never waits."""
        for each in (*self._connected.values(), self._socket):
            self._read(each, now)
        if now - self._sent < ALIVE_SECONDS:
            return
        self._sent = now
        self._count += 1
        for number, place in self._others.items():
            head = _HEAD.pack(self._own, number, self._count)
            with contextlib.suppress(OSError):  # no route: the other host notices the silence
                self._socket.sendto(head + hmac.digest(self._token, head, "sha256"), place)

    def silences(self, now: float) -> dict[int, float]:
        """Return the seconds since the last packet of each host that has been heard."""
        return {number: round(now - heard, 1) for number, heard in self._heard.items()}

    def close(self) -> None:
        """Close the port."""
        for each in (self._socket, *self._connected.values()):
            each.close()

    def _read(self, sock: socket.socket, now: float) -> None:
        """Read the packets that have arrived at a socket."""
        for _ in range(MOST_PACKETS):
            try:
                packet = sock.recv(_HEAD.size + _PROOF_BYTES + 1)
            except BlockingIOError:
                return
            except OSError:  # an earlier packet was refused (ICMP); the error is reported once
                continue
            self._note(packet, now)

    def _note(self, packet: bytes, now: float) -> None:
        """Note the sender of a packet, if it is one for this host and newer than all before."""
        head, proof = packet[: _HEAD.size], packet[_HEAD.size :]
        if len(packet) != _HEAD.size + _PROOF_BYTES or not self._token:
            return
        if not hmac.compare_digest(proof, hmac.digest(self._token, head, "sha256")):
            return
        number, receiver, count = _HEAD.unpack(head)
        if receiver == self._own and number in self._others and count > self._counts.get(number, 0):
            self._counts[number], self._heard[number] = count, now


def _bound(address: str, port: int, other: tuple[str, int] | None = None) -> socket.socket:
    """Return a socket at an address and a free port; with `other`, at the port of another socket, connected to it."""
    family, kind, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    found = socket.socket(family, kind)
    try:
        found.setblocking(False)
        if other is not None:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        found.bind(place)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # not before: it would share a port that is in use
        if other is not None:
            found.connect(other)
    except OSError:
        found.close()
        raise
    return found


def signs_at(address: str) -> SignsOfLife | None:
    """Return signs of life at an address of this host; None if it does not have the address."""
    try:
        return SignsOfLife(address)
    except OSError:
        return None
