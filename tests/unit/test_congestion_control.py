"""Connections between near hosts do not use BBR."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from unisono.distributed.connections import caller

AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="congestion control by connection needs Linux"),
    pytest.mark.skipif(
        not AVAILABLE.exists() or not {"bbr", "cubic"} <= set(AVAILABLE.read_text().split()),
        reason="the kernel has no tcp_bbr",
    ),
    pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() != 0, reason="only root may choose any of them"),
]


def control(connection: socket.socket) -> str:
    """Return the name of a connection's congestion control."""
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


@pytest.fixture
def connection() -> Iterator[socket.socket]:
    """Return a connection over loopback that uses BBR."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as ours,
        server.accept()[0],
    ):
        ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
        yield ours


def test_a_near_host_is_sent_to_with_cubic(connection: socket.socket) -> None:
    """The round trip of loopback is short."""
    assert 0 < caller.round_trip(connection) < caller.NEAR_SECONDS
    assert control(caller.tuned(connection)) == "cubic"


def test_a_distant_host_is_sent_to_with_the_systems_choice(
    connection: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round trip of the limit or more changes nothing."""
    monkeypatch.setattr(caller, "NEAR_SECONDS", 0.0)
    assert control(caller.tuned(connection)) == "bbr"


def test_another_choice_is_kept(connection: socket.socket) -> None:
    """Only BBR is replaced."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    assert control(caller.tuned(connection)) == "reno"
