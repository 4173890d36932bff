"""Loader workers: processes that are born by fork, and may die.

CPython before 3.12 can hang in the child of a fork, before any Python runs there, if one of the library's own threads
was asking for the interpreter at that moment (it holds a lock that nobody gives back in the child). gloo's threads do
that when a collective is over and a tensor is let go: about once in a thousand forks here. So workers report for duty,
and those that do not are started again.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TypeVar

from unisono.errors import DataError

T = TypeVar("T")

PATIENCE_SECONDS = 5.0
"""How long a worker may take to begin, at first; then twice as long, up to ATTEMPTS times. It usually takes 20 ms, and
starting one again that was only slow costs nothing but time."""

ATTEMPTS = 4


def start(begin: Callable[[Callable[[int], None]], Iterator[T]], workers: int) -> Iterator[T]:
    """What `begin(arrived)` returns, when all its workers have arrived: each calls arrived(number) as it begins.

    Raises DataError if they do not, however often they are started.
    """
    if workers == 0 or multiprocessing.get_start_method() != "fork":
        batches = begin(_nobody_waits)
        deaths.listen()
        return batches
    for attempt in range(ATTEMPTS):
        register = _Register(workers)
        before = {child.pid for child in multiprocessing.active_children()}
        batches = begin(register.arrived)
        deaths.listen()
        children = [child for child in multiprocessing.active_children() if child.pid not in before]
        deadline = time.monotonic() + PATIENCE_SECONDS * 2**attempt
        while time.monotonic() < deadline:
            here = register.pids()
            if all(child.pid in here or not child.is_alive() for child in children):  # a death is told by the fetch
                return batches
            time.sleep(0.001)
        for child in children:
            if child.pid not in here:
                child.kill()
                child.join()
        del batches
        deaths.forget()
    raise DataError(
        f"{workers} loader workers were to begin.",
        f"Not all of them did, {ATTEMPTS} times in a row.",
        "--set loader.workers=0 fetches in the process itself.",
    )


class _Register:
    """Memory that this process and its forks share: each worker writes its process number into its line."""

    def __init__(self, workers: int) -> None:
        self.lines = mmap.mmap(-1, 8 * workers)
        self.parent = os.getpid()

    def arrived(self, worker: int) -> None:
        if os.getppid() != self.parent:  # it was killed meanwhile; torch looks for a change after this
            os._exit(1)
        struct.pack_into("=q", self.lines, 8 * worker, os.getpid())

    def pids(self) -> set[int]:
        return {pid for (pid,) in struct.iter_unpack("=q", self.lines[:])}


def _nobody_waits(worker: int) -> None:
    pass


def tells_of_a_death(error: Exception) -> bool:
    """Is this how torch says that a worker is gone? What it had sent can then often not be opened any more."""
    if isinstance(error, RuntimeError):
        return str(error).startswith("DataLoader worker (pid")
    sent_home = str(error).startswith("Caught ")  # the data set's own error, from a worker that lives
    return isinstance(error, (ConnectionError, EOFError, FileNotFoundError)) and not sent_home


class Deaths:
    """Workers that died. torch tells of one by raising wherever the main thread happens to be: here it is told when
    the next micro-batch is fetched, where its place is known."""

    def __init__(self) -> None:
        self._fetching = False
        self._untold: RuntimeError | None = None
        self._torchs: Any = None

    def listen(self) -> None:
        """Come between the signal and torch's handler, which is there once a DataLoader has workers."""
        handler = signal.getsignal(signal.SIGCHLD)
        if callable(handler) and handler != self._hear and threading.current_thread() is threading.main_thread():
            self._torchs = handler
            signal.signal(signal.SIGCHLD, self._hear)

    def forget(self) -> None:
        """Those that died until now were meant to."""
        self._untold = None

    def _hear(self, number: int, frame: FrameType | None) -> None:
        try:
            self._torchs(number, frame)
        except RuntimeError as error:
            if self._fetching:
                raise
            self._untold = error

    def told(self, batches: Iterator[T]) -> T | None:
        """The next of what workers fetch, None at the end; raises RuntimeError if one of them has died."""
        self._fetching = True
        try:
            if self._untold is not None:
                untold, self._untold = self._untold, None
                raise untold
            return next(batches, None)
        finally:
            self._fetching = False


deaths = Deaths()
