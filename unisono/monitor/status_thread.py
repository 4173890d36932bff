"""Detect hangs: a thread in every process reports where its main thread is, even if that waits without the interpreter.

    main thread    forward   backward   exchange .................... (waits in a collective, in compiled code)
    this thread    . . . . . . . . . . . . . . . . . . . . . . . . .  once a second: step, phase, virtual rank, line

It writes a ProcessStatus (launcher/status_file.py). Our launcher has a thread that reads the statuses of all processes
and judges them. Under another launcher, processes exchange statuses through the rendezvous store, and each of them
judges in the same way; the first one that is not silent prints the verdict.

Progress is a change of phase, a micro-batch (in evaluation too), or a collective of any group. A fetch, a forward pass
or a checkpoint that takes longer than the limit is no progress. A run in which a process computes is slow, and is not
ended: a long compilation or an evaluation by hand is reported, and nothing more. The limit is three times as long until
a process has done its first step, because data is fetched and memory allocated then. It is twelve times as long for all
while a process compiles (torch.compile).
"""

from __future__ import annotations

import faulthandler
import linecache
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import replace
from sys import _current_frames
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

import psutil  # type: ignore[import-untyped]

from unisono import phases
from unisono.environment import World
from unisono.launcher import failure_record, status_file
from unisono.launcher.hang_report import ReportBackoff, judge
from unisono.launcher.status_file import ProcessStatus
from unisono.monitor import flight_recorder
from unisono.monitor.status_store import StatusStore, alone, build_status_store, hosts_by_rank

if TYPE_CHECKING:
    from unisono.config import WatchdogSettings

BEAT_SECONDS = 1.0
"""Time between two reports."""

FIRST_STEP_TIMES = 3.0
"""Factor of the limit before the first step: half an hour by default, as long as a collective waits for a peer."""

COMPILE_TIMES = 12.0
"""Factor of the limit while a process compiles: two hours by default. Compilation reports no progress."""

PRINT_SECONDS = 1.0
"""Time that the process which prints the verdict has before the others exit."""

DEBUGGERS = ("pdb.py", "bdb.py", "code.py", "pydevd.py", "pydevd_frame.py")
"""Files whose frames mean that a person debugs."""


class StatusThread:
    """A context in which the status of this process is reported."""

    def __init__(self, settings: WatchdogSettings, world: World, *, encrypted: bool = False) -> None:
        """Create a thread that has not begun.

        Args:
            settings: the limit, and the action at a hang.
            world: this process's place in the run.
            encrypted: whether processes may exchange statuses only over the run's own encrypted connections.
        """
        self.settings, self.world = settings, world
        self._encrypted = encrypted
        self._beat = min(BEAT_SECONDS, max(settings.timeout / 10, 0.05))
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._idle = 0.0
        self._counted = time.monotonic()
        self._progress: tuple[Any, ...] = ()
        self._status: ProcessStatus | None = None  # kept while there is no progress
        self._used: tuple[float, float] | None = None  # time and CPU seconds at the first look without progress
        self._call = "", False  # the last collective, and whether it is pending
        self._backoff = ReportBackoff()
        self._path = failure_record.path()
        self._stacks: TextIO | None = None

    def __enter__(self) -> StatusThread:
        if self.settings.timeout > 0 and threading.current_thread() is threading.main_thread():
            self._register_signal()
            self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
            self._write(self._current())
            before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # main thread only
            self._thread.start()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(5 * BEAT_SECONDS)
        if self._stacks is not None and status_file.SIGNAL is not None:
            faulthandler.unregister(status_file.SIGNAL)
            self._stacks.close()

    def _register_signal(self) -> None:
        """Make faulthandler write the stacks of all threads at our signal, in this process and in forked ones."""
        if status_file.SIGNAL is None or self._path is None:
            return
        self._stacks = status_file.stacks_path(self._path).open("a")
        faulthandler.register(status_file.SIGNAL, file=self._stacks, all_threads=True)

    # -- the thread

    def _watch(self) -> None:
        store: StatusStore | None = None
        while not self._over.wait(self._beat):
            self._count()
            status = self._current()
            if self._write(status):
                continue
            store = store or build_status_store(self.world, status, encrypted=self._encrypted)
            known = store.publish(status) if store is not None else alone(status, by_rank=hosts_by_rank(self.world))
            self._judge(status, known)

    def _write(self, status: ProcessStatus) -> bool:
        """Write the status for our launcher. Returns False under another launcher."""
        if self._path is not None:
            status.write(self._path.with_suffix(".status"))
        return self._path is not None

    def _count(self) -> None:
        """Add the time since the last beat to the idle time if there was no progress."""
        here = phases.position
        moves = (
            here.moves,
            here.step,
            here.virtual_rank,
            phases.CommWait.seconds,
            flight_recorder.collective_progress(),
        )
        now = time.monotonic()
        passed, self._counted = min(now - self._counted, 2 * self._beat), now
        if moves != self._progress:
            self._progress, self._idle, self._status, self._used = moves, 0.0, None, None
            self._backoff.reset()
        else:
            self._idle += passed  # at most two beats, so that a suspended machine does not count

    @property
    def _limit(self) -> float:
        times = 1.0 if phases.position.steps > 1 else FIRST_STEP_TIMES
        return self.settings.timeout * (COMPILE_TIMES if phases.position.compiles else times)

    def _current(self) -> ProcessStatus:
        """Return the status of the main thread, with details only after half of the limit without progress."""
        here = phases.position
        if self._status is None or self._idle < self._limit / 2:
            self._status = ProcessStatus(
                rank=self.world.rank if self.world.number is None else self.world.number,  # as its log is named
                size=self.world.size,
                pid=os.getpid(),
                host=self.world.host or socket.gethostname(),
                written=0.0,
                idle=0.0,
                phase="compile" if here.compiles else phases.now(),
                step=here.step,
                virtual_rank=here.virtual_rank,
                limit=self._limit,
                then=self.settings.action,
                thread=threading.main_thread().ident or 0,
            )
        if self._idle >= self._limit / 2:
            self._add_details()
        return replace(self._status, written=status_file.now(), idle=self._idle)

    def _add_details(self) -> None:
        """Add the line, the collective, the workers, and the share of a core that is used."""
        assert self._status is not None
        if self._used is None:
            self._used = time.monotonic(), self._cpu_seconds()
            self._call = flight_recorder.last_call()
        where, code, waits = describe_frame(_current_frames().get(threading.main_thread().ident or 0))
        call, pending = self._call
        if pending and not waits and (".wait(" in code or call.startswith("nccl")):
            waits = "others"  # in compiled code, below the script's own line
        call = call if waits == "others" and pending else ""
        self._status = replace(self._status, where=where, code=code, waits=waits, call=call)
        began, seconds = self._used
        span = time.monotonic() - began
        if span >= self._beat / 2:
            self._status = replace(self._status, share=(self._cpu_seconds() - seconds) / span)
        if self._status.waits == "workers" and self._idle >= self._limit - 2 * self._beat and not self._status.workers:
            self._status = replace(self._status, workers=self._workers())

    def _cpu_seconds(self) -> float:
        """Return the CPU time of this process and its children, without that of this thread."""
        return status_file.cpu_seconds(os.getpid()) - time.thread_time()

    def _workers(self) -> tuple[str, ...]:
        """Return a text for each state of the loader's workers."""
        states: dict[str, list[int]] = {}
        for child in psutil.Process().children():
            state = status_file.state_of(child.pid)
            line = ""
            if self._path is not None:
                main = threading.main_thread().ident or 0
                line = status_file.line_of_silent(child.pid, status_file.stacks_path(self._path), main)
            if line:
                state = "is"
            states.setdefault(f"{state} at {line}" if line else state, []).append(child.pid)
        return tuple(f"process {', '.join(map(str, pids))} {state}" for state, pids in states.items())

    # -- under another launcher

    def _judge(self, mine: ProcessStatus, known: list[ProcessStatus]) -> None:
        """Judge as every process does. The first one that is not silent prints the verdict."""
        verdict = judge(known)
        if verdict is None:
            return
        prints = mine.rank == min(status.rank for status in known if not status.silent)
        if prints and self._backoff.is_due(mine.idle):
            print(f"\n{verdict.error}", file=sys.stderr, flush=True)
        if verdict.then != "wait":  # a silent process cannot be killed from here
            time.sleep(0.0 if prints else PRINT_SECONDS)
            os._exit(verdict.error.exit_status)  # the main thread waits in compiled code, so nothing else ends it


def describe_frame(frame: FrameType | None) -> tuple[str, str, str]:
    """Return where a thread is: the position in the user's code, its source line, and what the thread waits for.

    Args:
        frame: The innermost frame of the thread.
    """
    user_frame: FrameType | None = None
    waits: str | None = None
    innermost = frame
    while frame is not None:
        filename = frame.f_code.co_filename
        if os.path.basename(filename) in DEBUGGERS and not status_file.is_own(filename):
            waits = "person"
        if waits is None:
            waits = _waits_for(filename.replace(os.sep, "/"), frame.f_code.co_name)
        if user_frame is None and status_file.is_own(filename):
            user_frame = frame
        frame = frame.f_back
    seen = user_frame or innermost
    if seen is None:
        return "", "", ""
    filename, line = seen.f_code.co_filename, seen.f_lineno
    where = f"{os.path.basename(filename)}:{line} in {seen.f_code.co_name}"
    code = linecache.getline(filename, line).strip()[:60]
    return where, code, "person" if "input(" in code and not waits else waits or ""


WAITS = (
    ("/torch/distributed/rendezvous.py", "meeting"),
    ("/torch/distributed/", "others"),
    ("/torch/utils/data/dataloader.py", "workers"),
    ("/unisono/distributed/init.py", "meeting"),
    ("/unisono/distributed/rendezvous/", "meeting"),
    ("/unisono/distributed/membership/membership.py", "meeting"),
    ("/unisono/distributed/", "others"),
    ("/unisono/exchange/", "others"),
    ("/unisono/param_server/", "others"),
    ("/unisono/local_sgd/", "others"),
)
"""Parts of file names, and what a thread whose innermost frame is in such a file waits for."""

MEETING = ("init_process_group", "_store_based_barrier", "_new_process_group_helper", "_new_group_with_tag")


def _waits_for(filename: str, function: str) -> str | None:
    """Return what a frame waits for; "": nothing; None: unknown, so the calling frame is examined."""
    for part, waits in WAITS:
        if part in filename:
            return "meeting" if function in MEETING else waits
    library = filename.startswith(("<", *status_file.LIBRARIES)) and "site-packages" not in filename
    return None if library else ""
