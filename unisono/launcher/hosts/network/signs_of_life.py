"""Signs of life that hosts send to each other, to find hosts that reach the launcher and not each other.

    agent on a ◀── one small UDP packet a second ──▶ agent on b
         ╚═ "b has been silent for 0.4 s" ═▶ launcher ◀═ "a has been silent for 11 s" ═╝

Only a host that has been heard once can become silent. So a firewall that drops all UDP packets ends no run.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Mapping
from typing import Any

ALIVE_SECONDS = 1.0
"""Seconds between two signs of life, in each direction."""

SILENCE_SECONDS = 10.0
"""Seconds without a sign of life after which the other end of a connection counts as gone."""

PACKET = 256
"""Bytes of the largest packet."""


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
        family, kind, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM)[0]
        self._socket = socket.socket(family, kind)
        self._socket.setblocking(False)
        try:
            self._socket.bind(place)
        except OSError:
            self._socket.close()
            raise
        self.port = int(self._socket.getsockname()[1])
        self._packet = b""
        self._others: dict[int, tuple[str, int]] = {}
        self._token = ""
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
        for number in [each for each in self._heard if places.get(each) != self._others.get(each)]:
            del self._heard[number]  # it has started again
        self._packet = json.dumps([token, own]).encode()
        self._token, self._others = token, places

    def exchange(self, now: float) -> None:
        """Read the packets that have arrived, and send one to each host if it is time. Never waits."""
        while packet := self._read():
            with contextlib.suppress(ValueError, TypeError):
                token, number = json.loads(packet)
                if token == self._token and number in self._others:
                    self._heard[number] = now
        if now - self._sent < ALIVE_SECONDS:
            return
        self._sent = now
        for place in self._others.values():
            with contextlib.suppress(OSError):  # no route: the other host notices the silence
                self._socket.sendto(self._packet, place)

    def silences(self, now: float) -> dict[int, float]:
        """Return the seconds since the last packet of each host that has been heard."""
        return {number: round(now - heard, 1) for number, heard in self._heard.items()}

    def close(self) -> None:
        """Close the port."""
        self._socket.close()

    def _read(self) -> bytes:
        """Return a packet; b"" if none has arrived."""
        while True:
            try:
                return self._socket.recv(PACKET)
            except BlockingIOError:
                return b""
            except OSError:  # an earlier packet was refused (ICMP); the error is reported once
                continue


def signs_at(address: str) -> SignsOfLife | None:
    """Return signs of life at an address of this host; None if it does not have the address."""
    try:
        return SignsOfLife(address)
    except OSError:
        return None
