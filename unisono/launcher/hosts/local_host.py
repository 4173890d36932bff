"""The launcher's own host, if processes of a run on several hosts run on it."""

from __future__ import annotations

import signal

from unisono.launcher.worker_process import LocalHandle, WorkerSpec


class LocalHost:
    """The processes on the launcher's host.

    Attributes:
        lost: whether they have been ended because this host does not reach others.
    """

    def __init__(self) -> None:
        self.lost = False
        self._handles: list[LocalHandle] = []

    def start(self, spec: WorkerSpec) -> LocalHandle:
        """Start a process."""
        handle = LocalHandle(spec)
        self._handles.append(handle)
        return handle

    def lose(self) -> None:
        """Kill all processes."""
        self.lost = True
        for handle in self._handles:
            if handle.returncode is None:
                handle.signal(signal.SIGKILL, group=True)
