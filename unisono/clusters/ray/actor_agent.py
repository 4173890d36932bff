"""The agent in an actor of Ray: it serves the launcher, as agents on other hosts do (launcher/hosts/host_agent.py).

    launcher ◀══ TCP, to its port ══ agent ──▶ process
                     worker of Ray ──stdin──▶ agent: its end is that of the actor

It prints the output of its process, too, so that Ray has it in the log of the actor (`ray logs`).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from unisono.clusters.ray.rank_actor import PURPOSE, AgentOrder
from unisono.handshake.mutual_proof import RunSecret
from unisono.launcher.elastic_policy import socket_folder
from unisono.launcher.hosts.host_agent import HostAgent
from unisono.launcher.hosts.message_stream import MessageStream
from unisono.launcher.hosts.node_link import ConnectedMember, connect_member

CONNECT_SECONDS = 20.0
"""Time limit for the connection to the launcher."""

RETRY_SECONDS = 0.5

CANNOT_REACH = 3
"""Exit status of an agent that could not connect."""


class ActorStream(MessageStream):
    """The connection to the launcher. It prints output, and names the host after the node of Ray.

    Args:
        connection: the socket.
        node: the id of the node. Several nodes may have one host name: in containers, and in tests.
    """

    def __init__(self, connection: socket.socket, node: str) -> None:
        super().__init__(connection.fileno(), connection.fileno())
        self._node = node

    def send(self, data: bytes = b"", **values: Any) -> None:
        if "output" in values:
            with contextlib.suppress(OSError):  # the disk with Ray's logs is full
                os.write(1, data)
        if "facts" in values:
            facts = values["facts"]
            values["facts"] = {**facts, "host": f"{facts['host']}-{self._node[:8]}"}
        super().send(data, **values)


def main() -> int:
    """Serve the launcher. Return the exit status."""
    order = AgentOrder(*json.loads(sys.stdin.readline()))
    try:
        found = _reach(order)
    except OSError as error:
        print(f"Cannot reach {order.address}, port {order.port}: {error.strerror or error}.", file=sys.stderr)
        return CANNOT_REACH
    threading.Thread(target=_end_with_actor, args=(found.connection,), name="actor", daemon=True).start()
    stream = ActorStream(found.connection, order.node)
    with found.connection, socket_folder() as folder:
        HostAgent(stream, Path(folder), reached_at=(found.peer, found.own)).serve()
    return 0


def _reach(order: AgentOrder) -> ConnectedMember:
    """Connect to the launcher, and prove the secret to each other. Raises OSError after CONNECT_SECONDS."""
    until, secret = time.monotonic() + CONNECT_SECONDS, RunSecret.from_hex(order.secret)
    while True:
        try:
            return connect_member((order.address, order.port), secret, PURPOSE, order.number)
        except OSError:
            if time.monotonic() > until:
                raise
        time.sleep(RETRY_SECONDS)


def _end_with_actor(connection: socket.socket) -> None:
    """End the connection, and with it the agent, when the actor has ended."""
    sys.stdin.read()
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    sys.exit(main())
