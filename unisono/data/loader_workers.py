"""Loader workers: start them, and restart them when one dies.

CPython before 3.12 can hang in a forked child before any Python code runs there, if another thread was requesting the
interpreter lock at that moment: the lock stays held in the child. gloo's threads do that when they release a tensor
after a collective, which hangs about one fork in a thousand. So workers report that they run, and those that do not
report are started again.

When a worker dies later (killed when memory runs out, say), all workers of its loader are restarted, since it may have
died holding the lock of the queue that they share. Each task contains its samples and its key, so the tasks that were
not delivered are fetched again, with the same bits.
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
"""begin(report) starts workers, each of which calls report(its number), and returns an iterator over their results."""

START_SECONDS = 5.0
"""Time limit for a worker to start, doubled for each of ATTEMPTS attempts. Starting usually takes 20 ms, and restarting
a worker that was only slow costs nothing but time."""

ATTEMPTS = 4


MOST_RESTARTS = 3
"""Restarts in a row without a delivered micro-batch. After these the fetch itself is taken for the cause."""


class WorkerIterator(Iterator[T]):
    """The results of one loader's workers, in order. Workers that die are restarted.

    Args:
        begin: starts the workers, and returns an iterator over all results that have not been delivered.
        count: number of workers.
        has_more: returns whether a result has not been delivered yet. Called after a death.
    """

    def __init__(self, begin: Begin[T], count: int, has_more: Callable[[], bool]) -> None:
        self._begin, self._count, self._has_more = begin, count, has_more
        self._restarts_in_a_row = 0
        self._signals = -1  # deaths.signals when the workers were last known to be alive
        self._batches, self._children = start(begin, count)

    def __next__(self) -> T:
        while True:
            try:
                signals, fetched = deaths.signals, deaths.next(self._batches, self._children, self._signals)
            except StopIteration:
                raise
            except Exception as error:
                if not self._count or not is_worker_death(error):
                    raise
                self._restart(error)
            else:
                self._signals, self._restarts_in_a_row = signals, 0
                return fetched

    def _restart(self, error: Exception) -> None:
        """Start new workers. Raises StopIteration if nothing is left to fetch, and an error if restarts do not help."""
        wait([child.sentinel for child in self._children], timeout=1.0)  # its socket may close before it ends
        dead = [child for child in self._children if child.exitcode is not None]
        self.close()
        if not self._has_more():
            raise StopIteration from error
        self._restarts_in_a_row += 1
        if self._restarts_in_a_row > MOST_RESTARTS:
            raise _death_error(dead) or error
        deaths.restarts += 1
        if deaths.restarts & (deaths.restarts - 1) == 0:  # the 1st, 2nd, 4th, 8th, ...
            _log.warning("%s", _warning(dead, deaths.restarts))
        self._signals = -1
        self._batches, self._children = start(self._begin, self._count)

    def close(self) -> None:
        """End the workers. torch itself would wait five seconds for a worker that waits for the lock of a dead one."""
        if any(child.exitcode is not None for child in self._children):
            for child in self._children:
                child.kill()
                child.join()
            _end_pin_memory_thread(self._batches)
            _replace_done_event(self._batches)
        self._batches, self._children = iter(()), []


def _warning(dead: Sequence[BaseProcess], restarts: int) -> str:
    causes = " and ".join(f"process {child.pid} {_cause(child.exitcode)}" for child in dead) or "a process is gone"
    times = f" This was restart {restarts}." if restarts > 1 else ""
    return (
        f"A loader worker died ({causes}). The workers were restarted and fetch the missing samples again: the result "
        f"stays the same.{times} If memory ran out, use fewer workers (--set loader.workers=1)."
    )


def _cause(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with status {code}"


def _end_pin_memory_thread(batches: Any) -> None:
    """End torch's thread that pins memory.

    A worker that died while writing leaves half a message. The thread would wait for the other half forever, and torch
    for the thread. torch has no public way to end it.
    """
    thread = getattr(batches, "_pin_memory_thread", None)
    if thread is None or batches._shutdown:  # noqa: SLF001  (torch has ended it, after the last batch)
        return
    batches._pin_memory_thread_done_event.set()  # noqa: SLF001
    batches._worker_result_queue.put((None, None))  # noqa: SLF001  (wakes it)
    thread.join(6.0)  # seconds; the thread polls every five
    if thread.is_alive():
        batches._shutdown = True  # noqa: SLF001  (so that torch does not join it)


def _replace_done_event(batches: Any) -> None:
    """Give torch another event to end its workers with, which are all dead.

    A worker that died while it read the event holds its lock, and torch would wait for that lock forever.
    """
    if hasattr(batches, "_workers_done_event"):
        batches._workers_done_event = multiprocessing.Event()  # noqa: SLF001


def start(begin: Begin[T], workers: int) -> tuple[Iterator[T], list[BaseProcess]]:
    """Call `begin` and wait until all workers have reported. Return its iterator, and the workers.

    Raises:
        DataError: not all of them reported in any of the attempts.
    """
    before = {child.pid for child in multiprocessing.active_children()}
    if workers == 0 or multiprocessing.get_start_method() != "fork":
        deaths.install()
        batches = begin(_ignore_report)
        return batches, _children_since(before)
    deaths.install()
    for attempt in range(ATTEMPTS):
        register = _Register(workers)
        batches = begin(register.report)
        children = _children_since(before)
        deadline = time.monotonic() + START_SECONDS * 2**attempt
        while time.monotonic() < deadline:
            running = register.pids()
            if all(child.pid in running or not child.is_alive() for child in children):  # the fetch notices a death
                return batches, children
            time.sleep(0.001)
        for child in children:
            if child.pid not in running:
                child.kill()
                child.join()
        del batches
    raise DataError(
        f"Cannot start {workers} loader workers.",
        f"In each of {ATTEMPTS} attempts at least one did not start in time.",
        "--set loader.workers=0 fetches without workers.",
    )


def _children_since(before: set[int | None]) -> list[BaseProcess]:
    """Return the children of this process whose ids are not in `before`."""
    return [child for child in multiprocessing.active_children() if child.pid not in before]


class _Register:
    """Memory shared with forked workers: each worker writes its process id into its entry."""

    def __init__(self, workers: int) -> None:
        self.entries = mmap.mmap(-1, 8 * workers)
        self.parent = os.getpid()

    def report(self, worker: int) -> None:
        if os.getppid() != self.parent:  # the parent was killed; torch notices only a later change of parent
            os._exit(1)
        struct.pack_into("=q", self.entries, 8 * worker, os.getpid())

    def pids(self) -> set[int]:
        return {pid for (pid,) in struct.iter_unpack("=q", self.entries[:])}


def _ignore_report(worker: int) -> None:
    pass


def is_worker_death(error: Exception) -> bool:
    """Return whether this error of a DataLoader means that a worker died. Often its tensors cannot be opened then."""
    if isinstance(error, RuntimeError):
        return str(error).startswith(("DataLoader worker (pid", "Pin memory thread exited"))
    of_data_set = str(error).startswith("Caught ")  # an error of the data set, sent by a worker that is alive
    return isinstance(error, (ConnectionError, EOFError, FileNotFoundError)) and not of_data_set


class WorkerDeaths:
    """A SIGCHLD handler that reports dead workers only where their loader is waited for.

    torch's own handler raises wherever the main thread happens to be.
    """

    def __init__(self) -> None:
        self._awaited: Sequence[BaseProcess] = ()
        """Workers that the main thread waits for."""
        self._torch_handler: Any = None
        self.signals = 0
        """Number of SIGCHLD signals. A change means that some child has ended; polling each costs 2 microseconds."""
        self.restarts = 0
        """How often the workers of any loader were restarted in this process."""

    def install(self) -> None:
        """Install the handler in front of torch's. Call it before the first worker starts."""
        if threading.current_thread() is not threading.main_thread():
            return
        signal_handling._set_SIGCHLD_handler()  # noqa: SLF001  (torch installs its own once, with the first worker)
        handler = signal.getsignal(signal.SIGCHLD)
        if callable(handler) and handler != self._on_sigchld:
            self._torch_handler = handler
            signal.signal(signal.SIGCHLD, self._on_sigchld)

    def _on_sigchld(self, number: int, frame: FrameType | None) -> None:
        self.signals += 1
        try:
            self._torch_handler(number, frame)
        except RuntimeError:  # a worker that ends as planned raises nothing: at the end torch waits within a fetch
            self._raise_if_dead(self._awaited)

    def next(self, batches: Iterator[T], children: Sequence[BaseProcess], signals: int) -> T:
        """Return the next result of these workers.

        Args:
            batches: their iterator.
            children: the workers.
            signals: `self.signals` when they were last known to be alive.

        Raises:
            RuntimeError: one of them has died.
        """
        try:
            if threading.current_thread() is threading.main_thread():  # signals are handled there
                self._awaited = children
            if self.signals != signals:
                self._raise_if_dead(children)
            return next(batches)
        finally:
            self._awaited = ()

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Do not interrupt this block; report a death in it at its end."""
        (awaited, self._awaited), signals = (self._awaited, ()), self.signals
        try:
            yield
        finally:
            self._awaited = awaited
        if self.signals != signals:
            self._raise_if_dead(awaited)

    def _raise_if_dead(self, children: Sequence[BaseProcess]) -> None:
        if (error := _death_error(children)) is not None:
            raise error


def _death_error(children: Sequence[BaseProcess]) -> RuntimeError | None:
    """Return an error with torch's words if one of these has died."""
    for child in children:
        if child.exitcode is not None:
            return RuntimeError(f"DataLoader worker (pid {child.pid}) {_cause(child.exitcode)}.")
    return None


deaths = WorkerDeaths()
