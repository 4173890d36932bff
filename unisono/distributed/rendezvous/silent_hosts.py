"""End connections to hosts that have fallen silent, where no launcher of ours notices that a host is gone.

A host that is powered off, or whose cable is pulled, sends nothing: no end of its connections. Its peers would wait for
the half hour of a collective's timeout. The system can find that out:

    nothing to send     the kernel asks the other host every few seconds (keepalive), and ends the connection
    data on the way     the kernel repeats it for a quarter of an hour: this thread reads since when no host confirms it

TCP_USER_TIMEOUT would cover both. But it also ends the connection to a process that is alive and computes for longer
than that, without reading.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time

SILENCE_SECONDS = 20
"""Seconds without an answer of the other host's kernel after which a connection ends."""

IDLE_SECONDS, ASKS = 5, 3
"""The kernel asks after IDLE_SECONDS without data and repeats that as often."""

CHECK_SECONDS = 1.0

PROBES = 5
"""Unanswered questions of the kernel whether the other end has room again."""

TCP_INFO_BYTES = 60
"""The beginning of struct tcp_info in linux/tcp.h, to tcpi_last_ack_recv."""


class ConnectionState:
    """What the kernel knows about a connection.

    Args:
        connection: a TCP connection.

    Attributes:
        retransmits: how often the oldest data was repeated.
        probes: unanswered questions whether the other end has room.
        silence: seconds since the other end has confirmed anything.
    """

    def __init__(self, connection: socket.socket) -> None:
        found = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
        self.retransmits, self.probes = found[2], found[3]
        self.silence = struct.unpack_from("=I", found, 56)[0] / 1000

    @property
    def is_dead(self) -> bool:
        """Whether the other host does not answer."""
        return self.silence > SILENCE_SECONDS and (self.retransmits > 0 or self.probes >= PROBES)


def open_sockets() -> dict[str, int]:
    """Return the descriptors of this process's sockets by the kernel's name, "socket:[4711]".

    A descriptor is not enough: once closed, its number may be reused for another socket.
    """
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{number}")
            if name.startswith("socket:"):
                found[name] = int(number)
    return found


class SilenceLimit:
    """Ends connections of this process to hosts that have fallen silent."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._thread = threading.Thread(target=self._serve, name="silent hosts", daemon=True)

    def add(self) -> None:
        """Watch all TCP connections to other hosts that exist now."""
        for name, descriptor in open_sockets().items():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                if connection.family == socket.AF_UNIX or connection.type != socket.SOCK_STREAM:
                    continue
                if connection.getpeername()[0] == connection.getsockname()[0]:  # fails for a socket that listens
                    continue
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_SECONDS)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, IDLE_SECONDS)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, ASKS)
                self._names.add(name)
        if self._names and not self._thread.is_alive():
            self._thread.start()

    def add_more(self) -> None:
        """Watch connections that were opened later, if any are watched."""
        if self._names:
            self.add()

    def _serve(self) -> None:
        while True:
            time.sleep(CHECK_SECONDS)
            for name, descriptor in open_sockets().items():
                if name in self._names:
                    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                        if ConnectionState(connection).is_dead:
                            connection.shutdown(socket.SHUT_RDWR)


SILENCE_LIMIT = SilenceLimit()
"""That of this process, whose connections belong to torch's groups and stores."""
