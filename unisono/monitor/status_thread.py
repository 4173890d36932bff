"""Stuck, with a name: a thread in every process says where its main thread stands, whatever that one waits for.

    main thread    forward   backward   exchange .................... (waits in a collective, without the interpreter)
    this thread    . . . . . . . . . . . . . . . . . . . . . . . . .  once a second: step, phase, virtual rank, line

What it writes is a Place (launcher/status_file.py). Under our launcher, a lookout there reads the places of all
processes and judges. Under any other one, places go through the store where processes have met, each on a connection of
its own, and every process judges by itself, all in the same way; the first that can speak does.

What has gone on is counted: changes of phase, micro-batches (in evaluation, too), collectives of any group. A fetch,
a forward pass or a checkpoint that takes longer than the limit by itself counts as none. As long as somebody computes,
the run is not ended: it is slow. So a long compilation, or an evaluation by hand, is told of and nothing more. Until a
process has done its first step its limit is three times as long, since data is fetched and memory found then. While
one compiles (torch.compile), the limit of all is twelve times as long.
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
FIRST_STEP_TIMES = 3.0
"""Half an hour, with the default limit: what a collective waits for a peer anyway (distributed/process_group.py)."""

COMPILE_TIMES = 12.0
"""Two hours, with the default limit. Compiling is progress that nothing counts."""

SPEAK_SECONDS = 1.0
"""Who does not speak gives the one who does this long before it leaves."""

DEBUGGERS = ("pdb.py", "bdb.py", "code.py", "pydevd.py", "pydevd_frame.py")
"""Files of which a frame says that a person looks."""


class StatusThread:
    """A block in which somebody knows where this process stands.

    settings  when a run counts as stuck, and what is done then
    """

    def __init__(self, settings: WatchdogSettings, world: World) -> None:
        self.settings, self.world = settings, world
        self._beat = min(BEAT_SECONDS, max(settings.timeout / 10, 0.05))
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._main = threading.main_thread().ident or 0
        self._idle = 0.0
        self._counted = time.monotonic()
        self._moves: tuple[Any, ...] = ()
        self._place: ProcessStatus | None = None  # where we are stuck, looked at thoroughly
        self._used: tuple[float, float] | None = None  # when it began to be still, and seconds used until then
        self._call = "", False  # the last collective, and whether it is not over
        self._telling = ReportBackoff()
        self._path = failure_record.path()
        self._stacks: TextIO | None = None

    def __enter__(self) -> StatusThread:
        if self.settings.timeout > 0 and threading.current_thread() is threading.main_thread():
            self._listen()
            self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
            self._show(self._here())
            before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are the script's
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

    def _listen(self) -> None:
        """From now on our signal makes faulthandler write every thread's stack, here and in whatever is forked."""
        if status_file.SIGNAL is None or self._path is None:
            return
        self._stacks = status_file.stacks_path(self._path).open("a")
        faulthandler.register(status_file.SIGNAL, file=self._stacks, all_threads=True)

    # -- the thread

    def _watch(self) -> None:
        where: StatusStore | None = None
        while not self._over.wait(self._beat):
            self._count()
            place = self._here()
            if self._show(place):
                continue
            where = where or build_status_store(self.world, place)
            known = where.publish(place) if where is not None else alone(place, by_rank=hosts_by_rank(self.world))
            self._judge(place, known)

    def _show(self, place: ProcessStatus) -> bool:
        """To the launcher, if it is ours."""
        if self._path is not None:
            place.write(self._path.with_suffix(".place"))
        return self._path is not None

    def _count(self) -> None:
        """Has anything gone on since the last beat?"""
        here = phases.Position
        moves = (
            here.moves,
            here.step,
            here.virtual_rank,
            phases.CommWait.seconds,
            flight_recorder.collective_progress(),
        )
        now = time.monotonic()
        passed, self._counted = min(now - self._counted, 2 * self._beat), now
        if moves != self._moves:
            self._moves, self._idle, self._place, self._used = moves, 0.0, None, None
            self._telling.reset()
        else:
            self._idle += passed  # at most two beats: while the machine is suspended, nobody is stuck

    @property
    def _limit(self) -> float:
        times = 1.0 if phases.Position.steps > 1 else FIRST_STEP_TIMES
        return self.settings.timeout * (COMPILE_TIMES if phases.Position.compiles else times)

    def _here(self) -> ProcessStatus:
        """Where the main thread is. Only a process that has been still for a while is looked at thoroughly."""
        here = phases.Position
        if self._place is None or self._idle < self._limit / 2:
            self._place = ProcessStatus(
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
                thread=self._main,
            )
        if self._idle >= self._limit / 2:
            self._look()
        return replace(self._place, written=status_file.now(), idle=self._idle)

    def _look(self) -> None:
        """Line, collective, workers, and how much of a core is used."""
        assert self._place is not None
        if self._used is None:
            self._used = time.monotonic(), self._seconds()
            self._call = flight_recorder.last_call()
        where, code, waits = describe_frame(sys._current_frames().get(self._main))
        call, pending = self._call
        if pending and not waits and (".wait(" in code or call.startswith("nccl")):
            waits = "others"  # in compiled code, below the script's own line
        call = call if waits == "others" and pending else ""
        self._place = replace(self._place, where=where, code=code, waits=waits, call=call)
        began, seconds = self._used
        span = time.monotonic() - began
        if span >= self._beat / 2:
            self._place = replace(self._place, share=(self._seconds() - seconds) / span)
        if self._place.waits == "workers" and self._idle >= self._limit - 2 * self._beat and not self._place.workers:
            self._place = replace(self._place, workers=self._workers())

    def _seconds(self) -> float:
        """Of processor time, used here and by what was started here; without our own, which looking takes."""
        return status_file.seconds_of(os.getpid()) - time.thread_time()

    def _workers(self) -> tuple[str, ...]:
        """What the loader's workers do, those that are alike together."""
        told: dict[str, list[int]] = {}
        for child in psutil.Process().children():
            state = status_file.state_of(child.pid)
            line = ""
            if self._path is not None:
                line = status_file.line_of_silent(child.pid, status_file.stacks_path(self._path), self._main)
            if line:
                state = "is"
            told.setdefault(f"{state} at {line}" if line else state, []).append(child.pid)
        return tuple(f"process {', '.join(map(str, pids))} {does}" for does, pids in told.items())

    # -- without our launcher

    def _judge(self, mine: ProcessStatus, everybody: list[ProcessStatus]) -> None:
        """Every process comes to the same verdict; the first that is not silent says it."""
        verdict = judge(everybody)
        if verdict is None:
            return
        speaks = mine.rank == min(place.rank for place in everybody if not place.silent)
        if speaks and self._telling.is_due(mine.idle):
            print(f"\n{verdict.error}", file=sys.stderr, flush=True)
        if verdict.then != "wait":  # a silent one cannot be killed from here
            time.sleep(0.0 if speaks else SPEAK_SECONDS)
            os._exit(verdict.error.exit_status)  # nothing else ends a process whose main thread waits in compiled code


def describe_frame(frame: FrameType | None) -> tuple[str, str, str]:
    """Where a thread is, by its innermost frame: the user's line, what is written there, and whom it waits for, as a
    Place calls it."""
    own: FrameType | None = None
    waits: str | None = None
    innermost = frame
    while frame is not None:
        filename = frame.f_code.co_filename
        if os.path.basename(filename) in DEBUGGERS and not status_file.is_own(filename):
            waits = "person"
        if waits is None:
            waits = _whom(filename.replace(os.sep, "/"), frame.f_code.co_name)
        if own is None and status_file.is_own(filename):
            own = frame
        frame = frame.f_back
    seen = own or innermost
    if seen is None:
        return "", "", ""
    filename, line = seen.f_code.co_filename, seen.f_lineno
    where = f"{os.path.basename(filename)}:{line} in {seen.f_code.co_name}"
    code = linecache.getline(filename, line).strip()[:60]
    return where, code, "person" if "input(" in code and not waits else waits or ""


WHOM = (
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
"""Whose code the innermost frame is in, and whom it then waits for."""

MEETING = ("init_process_group", "_store_based_barrier", "_new_process_group_helper", "_new_group_with_tag")


def _whom(filename: str, function: str) -> str | None:
    """None: this frame does not tell, ask the one around it; "": nobody."""
    for part, whom in WHOM:
        if part in filename:
            return "meeting" if function in MEETING else whom
    library = filename.startswith(("<", *status_file.LIBRARIES)) and "site-packages" not in filename
    return None if library else ""
