"""What the launcher does for a run whose processes may die: their meeting place, and others in place of the dead.

    launcher ──stdin (ends when the launcher dies)──▶ meeting place ──a line for every change──▶ launcher
         └─────── process 4, in place of process 2, which died ───▶ joins at a step's end

The meeting place's door is opened here and handed down, so that nobody who knocks finds it closed.
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
"""A process that gives no sign of life for so long counts as dead, and is killed so that it stays so. Its signs come
from a thread of its own, whatever it computes: only a process that is stopped, or holds Python's lock, gives none."""

LIMIT = 5
"""So many deaths in a row without a step between them, and nobody is started in their place any more."""

LONGEST_PATH = 100
"""Bytes; the name of a Unix socket has room for 107."""


class ElasticLauncher:
    """build    the task of a process with this number, in the place of that one
    minimum  processes that must be left, for the run to go on
    """

    def __init__(self, minimum: int, build: Callable[[int, int], WorkerSpec]) -> None:
        self.minimum, self.build = minimum, build
        self.step = -1  # as far as we have heard
        self.survived: list[list[int]] = []  # who were lost together, each time that others went on
        self._deaths = 0  # since then
        self._rest = b""
        self.meeting: subprocess.Popen[bytes] | None = None

    @contextmanager
    def open(self, path: Path, size: int, python: Sequence[str]) -> Iterator[None]:
        """The meeting place is there."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
            door.bind(str(path))
            door.listen(1024)
            arguments = map(str, (door.fileno(), size, self.minimum, SILENCE_SECONDS))
            self.meeting = subprocess.Popen(
                [*python, "-m", "unisono.launcher.rendezvous_server", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[door.fileno()],
                bufsize=0,
                start_new_session=True,
            )
        assert self.meeting.stdin is not None
        assert self.meeting.stdout is not None
        os.set_blocking(self.meeting.stdout.fileno(), False)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                self.meeting.stdin.close()
            try:
                self.meeting.wait(5.0)
            except subprocess.TimeoutExpired:
                self.meeting.kill()
                self.meeting.wait()
            self.meeting.stdout.close()

    def heard(self) -> list[dict[str, Any]] | None:
        """What happened since we asked last; None: the meeting place is gone."""
        assert self.meeting is not None
        assert self.meeting.stdout is not None
        try:
            data = os.read(self.meeting.stdout.fileno(), 1 << 16)
        except BlockingIOError:
            return []
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        events = [json.loads(line) for line in lines]
        for event in events:
            self.survived += [event["survived"]] if "survived" in event else []
            steps = [about["step"] for about in event.get("about", []) if "step" in about]
            if steps and max(steps) > self.step:
                self.step, self._deaths = max(steps), 0
        return events

    def hear_out(self) -> None:
        """All processes are gone, and so goes the meeting place, when it has passed on the last that they said."""
        if self.meeting is None:
            return
        assert self.meeting.stdin is not None
        with contextlib.suppress(OSError):
            self.meeting.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.meeting.wait(5.0)
        while self.heard():
            pass

    def may_replace(self, *, one_death: bool = True) -> bool:
        """A process is gone, by a death of its own or not. Is another one to be started in its place?"""
        self._deaths += one_death
        return self._deaths <= LIMIT


def socket_folder() -> tempfile.TemporaryDirectory[str]:
    """A private folder (mode 0700), whose names are short enough for a socket."""
    where = None if len(tempfile.gettempdir()) < LONGEST_PATH - 30 or sys.platform == "win32" else "/tmp"
    return tempfile.TemporaryDirectory(prefix="unisono-", ignore_cleanup_errors=True, dir=where)
