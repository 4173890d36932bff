"""Count the bytes that this process has sent and received over its TCP connections, as the kernel counts them.

The kernel counts for every connection (struct tcp_info, linux/tcp.h), so nothing has to be counted while a run trains.
Connections that are closed are not counted.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from typing import NamedTuple

BYTES_ACKED = struct.Struct("=QQ")
OFFSET = 120
"""Place of tcpi_bytes_acked and tcpi_bytes_received in struct tcp_info, since Linux 4.2."""


class TcpTraffic(NamedTuple):
    """Bytes that the peers have acknowledged, and bytes received."""

    sent: int
    received: int


def read_tcp_traffic() -> TcpTraffic | None:
    """Return the traffic of all open TCP connections of this process, or None if the kernel does not count it."""
    sent = received = 0
    info = ctypes.create_string_buffer(256)
    # not through Python's sockets: an object for an existing connection may make the connection non-blocking
    getsockopt = ctypes.CDLL(None).getsockopt
    try:
        numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return None
    for number in numbers:
        length = ctypes.c_uint32(len(info))
        if getsockopt(number, socket.IPPROTO_TCP, socket.TCP_INFO, info, ctypes.byref(length)):
            continue  # no TCP connection
        if length.value < OFFSET + BYTES_ACKED.size:
            return None
        acked, got = BYTES_ACKED.unpack_from(info, OFFSET)
        sent, received = sent + acked, received + got
    return TcpTraffic(sent, received)
