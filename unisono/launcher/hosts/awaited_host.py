"""A lost host whose replacement is on its way: processes for it wait until it is there."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any

from unisono.launcher.hosts.remote_host import RemoteHost, RemoteProcess
from unisono.launcher.worker_process import WorkerSpec

Order = dict[str, Any]
"""The message that starts a process (RemoteHost.order_of)."""


class AwaitedHost:
    """A host that will connect, or never. Until then its processes have not begun, and a signal ends them.

    Args:
        name: the name of the host.
        complete: returns an order with what depends on the host, once that is known.
    """

    def __init__(self, name: str, complete: Callable[[int, Order], Order]) -> None:
        self.name, self._complete = name, complete
        self._waiting: dict[int, tuple[RemoteProcess, Order]] = {}
        self._remote: RemoteHost | None = None
        self._lock = threading.Lock()

    def start(self, number: int, world: Mapping[str, Any], spec: WorkerSpec) -> RemoteProcess:
        """Return a process that starts when the host is there."""
        with self._lock:
            process, order = RemoteProcess(self, number, spec.record), RemoteHost.order_of(world, spec)
            if self._remote is None:
                self._waiting[number] = process, order
            else:
                self._remote.adopt(process, self._complete(number, order))
            return process

    def send(self, data: bytes = b"", **values: Any) -> None:
        """Handle a signal to a process that has not begun."""
        with self._lock:
            waiting = self._waiting.pop(values.get("process", -1), None)
        if waiting is not None:
            waiting[0].end(-int(values["signal"]))

    def arrive(self, remote: RemoteHost) -> None:
        """Start the processes on the host, which has connected."""
        with self._lock:
            self._remote = remote
            for number, (process, order) in self._waiting.items():
                remote.adopt(process, self._complete(number, order))
            self._waiting.clear()

    def give_up(self) -> None:
        """End the processes: the host has connected, and cannot be used."""
        for number in list(self._waiting):
            self.send(process=number, signal=signal.SIGKILL)
