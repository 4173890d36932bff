"""Loader workers: processes that begin by fork, and may die.

CPython before 3.12 can hang in the child of a fork, before any Python runs there, if one of the library's own threads
was asking for the interpreter at that moment (it holds a lock that nobody gives back in the child). gloo's threads do
that when a collective is over and a tensor is let go: about once in a thousand forks here. So workers report for duty,
and those that do not are started again.

A worker that dies later (killed by the system when memory runs out, say) is started again too, with all the others of
its loader, since it may have died with the lock of the queue that they share. Each task names its samples and its key,
so what was dealt and has not been delivered is fetched again, and has the same bits.
"""

from __future__ import annotations

import logging
import mmap
import multiprocessing
import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, TypeVar

from torch.utils.data._utils import signal_handling

from unisono.errors import DataError

_log = logging.getLogger(__name__)

T = TypeVar("T")
Begin = Callable[[Callable[[int], None]], Iterator[T]]

PATIENCE_SECONDS = 5.0
"""How long a worker may take to begin, at first; then twice as long, up to ATTEMPTS times. It usually takes 20 ms, and
starting one again that was only slow costs nothing but time."""

ATTEMPTS = 4


MOST_RESTARTS = 3
"""Restarts in a row between which no micro-batch was delivered. The next death is an error: it is the fetch itself that
kills."""


class WorkerIterator(Iterator[T]):
    """What the workers of one loader fetch, in order; workers that die are started again.

    begin  begin(arrived) starts workers, each of which calls arrived(number), and returns an iterator over all that has
           not been delivered
    left   is there anything that has not been delivered? Called after a death
    """

    def __init__(self, begin: Begin[T], count: int, left: Callable[[], bool]) -> None:
        self._begin, self._count, self._left = begin, count, left
        self._in_a_row, self._heard = 0, -1
        self._batches, self._children = start(begin, count)

    def __next__(self) -> T:
        while True:
            try:
                heard, fetched = deaths.heard, deaths.next(self._batches, self._children, self._heard)
            except StopIteration:
                raise
            except Exception as error:
                if not self._count or not tells_of_a_death(error):
                    raise
                self._restart(error)
            else:
                self._heard, self._in_a_row = heard, 0
                return fetched

    def _restart(self, error: Exception) -> None:
        """Raises StopIteration if nothing is left to fetch, and `error` if restarts do not help."""
        wait([child.sentinel for child in self._children], timeout=1.0)  # its socket may be gone before it is
        dead = [child for child in self._children if child.exitcode is not None]
        self.close()
        if not self._left():
            raise StopIteration from error
        self._in_a_row += 1
        if self._in_a_row > MOST_RESTARTS:
            raise _dead(dead) or error
        deaths.restarts += 1
        if deaths.restarts & (deaths.restarts - 1) == 0:  # the 1st, 2nd, 4th, 8th, ...
            _log.warning("%s", _note(dead, deaths.restarts))
        self._heard = -1
        self._batches, self._children = start(self._begin, self._count)

    def close(self) -> None:
        """End the workers. One that waits for a lock of a dead one would hold up torch's own way for five seconds."""
        if any(child.exitcode is not None for child in self._children):
            for child in self._children:
                child.kill()
                child.join()
            _end_pinning(self._batches)
        self._batches, self._children = iter(()), []


def _note(dead: Sequence[BaseProcess], restarts: int) -> str:
    ends = " and ".join(f"process {child.pid} {_end(child.exitcode)}" for child in dead) or "a process is gone"
    times = f" This was restart {restarts}." if restarts > 1 else ""
    return (
        f"A loader worker died ({ends}). Workers were started again and fetch what was not delivered: the result stays "
        f"the same.{times} If memory ran out, use fewer workers (--set loader.workers=1)."
    )


def _end(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with status {code}"


def _end_pinning(batches: Any) -> None:
    """End torch's thread that pins memory. Of a worker that died while it wrote, half a message is left, for whose
    rest the thread would wait for ever, and torch for the thread."""
    thread = getattr(batches, "_pin_memory_thread", None)
    if thread is None:
        return
    batches._pin_memory_thread_done_event.set()
    batches._worker_result_queue.put((None, None))  # wakes it
    thread.join(6.0)  # seconds; it looks every five
    if thread.is_alive():
        batches._shutdown = True  # so torch does not join it


def start(begin: Begin[T], workers: int) -> tuple[Iterator[T], list[BaseProcess]]:
    """What `begin(arrived)` returns, when all its workers have arrived, and the workers.

    Raises DataError if they do not arrive, however often they are started.
    """
    before = {child.pid for child in multiprocessing.active_children()}
    if workers == 0 or multiprocessing.get_start_method() != "fork":
        deaths.listen()
        batches = begin(_nobody_waits)
        return batches, _since(before)
    deaths.listen()
    for attempt in range(ATTEMPTS):
        register = _Register(workers)
        batches = begin(register.arrived)
        children = _since(before)
        deadline = time.monotonic() + PATIENCE_SECONDS * 2**attempt
        while time.monotonic() < deadline:
            here = register.pids()
            if all(child.pid in here or not child.is_alive() for child in children):  # a death is seen by the fetch
                return batches, children
            time.sleep(0.001)
        for child in children:
            if child.pid not in here:
                child.kill()
                child.join()
        del batches
    raise DataError(
        f"{workers} loader workers were to begin.",
        f"Not all of them did, {ATTEMPTS} times in a row.",
        "--set loader.workers=0 fetches in the process itself.",
    )


def _since(before: set[int | None]) -> list[BaseProcess]:
    """The children that this process has now and had not then."""
    return [child for child in multiprocessing.active_children() if child.pid not in before]


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
        return str(error).startswith(("DataLoader worker (pid", "Pin memory thread exited"))
    sent_home = str(error).startswith("Caught ")  # the data set's own error, from a worker that lives
    return isinstance(error, (ConnectionError, EOFError, FileNotFoundError)) and not sent_home


class WorkerDeaths:
    """Workers that died. torch raises wherever the main thread happens to be when it hears of one: here that is only
    where it waits for one of the loader whose worker it was."""

    def __init__(self) -> None:
        self._awaited: Sequence[BaseProcess] = ()
        """Workers that the main thread waits for."""
        self._torchs: Any = None
        self.heard = 0
        """How often a child of this process, any, was said to have ended. Asking each costs two microseconds."""
        self.restarts = 0
        """How often workers were started again in this process, by any loader."""

    def listen(self) -> None:
        """Come between the signal and torch's handler, before the first worker starts."""
        if threading.current_thread() is not threading.main_thread():
            return
        signal_handling._set_SIGCHLD_handler()
        handler = signal.getsignal(signal.SIGCHLD)
        if callable(handler) and handler != self._hear:
            self._torchs = handler
            signal.signal(signal.SIGCHLD, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.heard += 1
        try:
            self._torchs(number, frame)
        except RuntimeError:  # not where one ends as it should: torch waits for that within a fetch, at the end
            self._raise_if_dead(self._awaited)

    def next(self, batches: Iterator[T], children: Sequence[BaseProcess], heard: int) -> T:
        """The next of what these workers fetch. Raises RuntimeError if one of them has died; `heard`: when they were
        last seen to live."""
        try:
            if threading.current_thread() is threading.main_thread():  # where signals are handled
                self._awaited = children
            if self.heard != heard:
                self._raise_if_dead(children)
            return next(batches)
        finally:
            self._awaited = ()

    @contextmanager
    def later(self) -> Iterator[None]:
        """What happens in this block is not interrupted; a death that is heard meanwhile is raised behind it."""
        (awaited, self._awaited), heard = (self._awaited, ()), self.heard
        try:
            yield
        finally:
            self._awaited = awaited
        if self.heard != heard:
            self._raise_if_dead(awaited)

    def _raise_if_dead(self, children: Sequence[BaseProcess]) -> None:
        if (dead := _dead(children)) is not None:
            raise dead


def _dead(children: Sequence[BaseProcess]) -> RuntimeError | None:
    """An error in torch's words, if one of these has died."""
    for child in children:
        if child.exitcode is not None:
            return RuntimeError(f"DataLoader worker (pid {child.pid}) {_end(child.exitcode)}.")
    return None


deaths = WorkerDeaths()
