"""The launcher's part in an elastic run: start the rendezvous server, and decide whether dead processes are replaced.

    launcher ──stdin (ends when the launcher dies)──▶ rendezvous server ──a line for every event──▶ launcher
         └─────── process 4 replaces process 2, which died ───▶ joins at the end of a step

The launcher opens the server's socket and passes it on, so that the socket exists before any process connects.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unisono.launcher.worker_process import WorkerSpec

SILENCE_SECONDS = 60.0
"""A process without a heartbeat for this long counts as dead and is killed. Heartbeats come from a thread of their own,
whatever the process computes. Only a process that is stopped, or that holds the interpreter lock, sends none."""

MAX_DEATHS = 5
"""Number of consecutive deaths without a step in between. After more deaths no process is replaced."""

SOCKET_PATH_BYTES = 100
"""Longest path in bytes. The address of a Unix socket has room for 107 bytes."""


class ElasticLauncher:
    """The rendezvous server of a run, and the history of its deaths.

    Args:
        minimum: number of processes that must remain for training to continue.
        build: build(number, replaced) returns the specification of process `number`, which replaces another one.
    """

    def __init__(self, minimum: int, build: Callable[[int, int], WorkerSpec]) -> None:
        self.minimum, self.build = minimum, build
        self.step = -1  # the latest step that processes have reported
        self.survived: list[list[int]] = []  # processes lost together, for each loss that others survived
        self._deaths = 0  # since the latest step
        self._rest = b""
        self.server: subprocess.Popen[bytes] | None = None

    @contextmanager
    def open(self, path: Path, size: int, python: Sequence[str]) -> Iterator[None]:
        """Run the rendezvous server, at the socket `path`, while the block runs."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(path))
            listener.listen(1024)
            arguments = map(str, (listener.fileno(), size, self.minimum, SILENCE_SECONDS))
            self.server = subprocess.Popen(
                [*python, "-m", "unisono.launcher.rendezvous_server", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                bufsize=0,
                start_new_session=True,
            )
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        os.set_blocking(self.server.stdout.fileno(), False)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                self.server.stdin.close()
            try:
                self.server.wait(5.0)
            except subprocess.TimeoutExpired:
                self.server.kill()
                self.server.wait()
            self.server.stdout.close()

    def read_events(self) -> list[dict[str, Any]] | None:
        """Return the events since the last call, or None if the server is gone."""
        assert self.server is not None
        assert self.server.stdout is not None
        try:
            data = os.read(self.server.stdout.fileno(), 1 << 16)
        except BlockingIOError:
            return []
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        events = [json.loads(line) for line in lines]
        for event in events:
            self.survived += [event["survived"]] if "survived" in event else []
            steps = [facts["step"] for facts in event.get("facts", []) if "step" in facts]
            if steps and max(steps) > self.step:
                self.step, self._deaths = max(steps), 0
        return events

    def drain(self) -> list[dict[str, Any]]:
        """End the server, after all processes have ended, and return its last events."""
        if self.server is None:
            return []
        assert self.server.stdin is not None
        with contextlib.suppress(OSError):
            self.server.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.server.wait(5.0)
        last: list[dict[str, Any]] = []
        while events := self.read_events():
            last += events
        return last

    def may_replace(self, *, new_death: bool = True) -> bool:
        """Return whether to replace a process. `new_death`: whether no other death caused its death."""
        self._deaths += new_death
        return self._deaths <= MAX_DEATHS


def socket_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a private folder (mode 0700) with a path that is short enough for a socket in it."""
    short = len(tempfile.gettempdir()) < SOCKET_PATH_BYTES - 30 or sys.platform == "win32"
    return tempfile.TemporaryDirectory(prefix="unisono-", ignore_cleanup_errors=True, dir=None if short else "/tmp")
