"""Heartbeats: a thread of each process reports to the rendezvous server that the process is alive, once a second.

The server (launcher/rendezvous_server.py) is the failure detector. A process is lost in three cases: its connection
ends; it has sent nothing for too long (it is stopped, or compiled code holds Python's interpreter lock); or it reports
that its main thread hangs between two groups (regroup_timeout.py).
"""

from __future__ import annotations

import threading
from typing import Protocol

from unisono.distributed.membership.regroup_timeout import RegroupTimeout

BEAT_SECONDS = 1.0
"""Seconds between two heartbeats."""


class Send(Protocol):
    """Send a message to the rendezvous server."""

    def __call__(self, **message: int | str) -> None: ...


class Heartbeats:
    """Send heartbeats until `stop` is called.

    Args:
        send: sends a message to the rendezvous server.
        timeout: watches the main thread. Its findings are sent, too.
    """

    def __init__(self, send: Send, timeout: RegroupTimeout) -> None:
        self._send, self._timeout, self._stopped = send, timeout, threading.Event()
        self.thread = threading.Thread(target=self._beat, name="heartbeats", daemon=True)
        self.thread.start()

    def _beat(self) -> None:
        while not self._stopped.wait(BEAT_SECONDS):
            self._send(heartbeat=1)
            if activity := self._timeout.check():
                self._send(stuck=activity)

    def stop(self) -> None:
        """Send no more heartbeats."""
        self._stopped.set()
