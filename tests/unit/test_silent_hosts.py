"""Connections to hosts that have fallen silent end; those to a process that is alive and does not read do not."""

from __future__ import annotations

import socket
import time

import pytest

from unisono.distributed.rendezvous import silent_hosts
from unisono.distributed.rendezvous.silent_hosts import ConnectionState, SilenceLimit


@pytest.fixture
def pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.2", 0)) as server:  # another address counts as another host
        near = socket.create_connection(server.getsockname(), source_address=("127.0.0.1", 0))
        far, _ = server.accept()
    return near, far


def test_a_peer_that_does_not_read_is_not_dead(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silent_hosts, "SILENCE_SECONDS", 0)
    near, far = pair
    near.setblocking(False)
    with near, far:
        while True:  # until the buffers of both ends are full
            try:
                near.send(bytes(1 << 20))
            except BlockingIOError:
                time.sleep(0.2)
                break
        for _ in range(10):
            assert not ConnectionState(near).is_dead
            time.sleep(0.1)


def test_connections_get_a_limit_of_silence(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    with near, far:
        SilenceLimit().add()
        assert near.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle = near.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
        every = near.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)
        assert idle + every * near.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == silent_hosts.SILENCE_SECONDS
        state = ConnectionState(near)
        assert (state.retransmits, state.probes) == (0, 0)
        assert 0 <= state.silence < 60
