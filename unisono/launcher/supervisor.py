"""Looking after the processes of a run on this host: their output, their failures, their end.

    launcher ──stdin (ends when the launcher dies)──▶ process ──stdout+stderr──▶ launcher ──▶ log/rank-N.log
                                                         │                          └─(rank 0)─▶ the screen
                                                         └──record-N.json, the moment an exception leaves the script

One thread, one loop, no torch. Every process has a session and a process group of its own, so that a Ctrl-C reaches
only us, and so that whatever a process started ends with it. The rules:

- The earliest failure is *the* failure. The others are told to end (SIGTERM), killed after a moment, and the failing
  rank's own traceback is the last thing on the screen.
- The first Ctrl-C, SIGTERM or SIGHUP asks every process to save and leave; a second Ctrl-C or SIGTERM kills them at
  once. When the first of them has left, the others have five minutes.
- Of a run whose processes can go on without one that dies (elastic_policy.py), a death by a signal is told and no
failure, as
  long as enough are left; another process is started in its place. The oldest one that lives speaks on the screen.
  Once the others say that they have it behind them, it is the reason of nothing that fails later.
- Some processes are spare by their own word (failure_record.py): the others go on without them. Of these a death is
told, and
  only an exception of the script's is a failure; and when the others are done, they have a moment.
- Nobody outlives us: when we are gone, standard input ends in every process, and it ends itself.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import IO, Any, NamedTuple

from unisono.launcher.elastic_policy import ElasticLauncher
from unisono.launcher.failure_record import clean_end_at, hands_off_shards, read
from unisono.launcher.worker_process import CRASHES, WorkerFailure, WorkerProcess, WorkerSpec

__all__ = ["WorkerFailure", "RunOutcome", "WorkerSpec", "supervise"]

LOOK_SECONDS = 0.1
"""Between two looks at the records; exits and output wake us at once."""
GRACE_SECONDS = 0.4
"""After a failure the other processes have this long to say something, so that a traceback is there within a second."""
BEQUEST_SECONDS = 30.0
"""The same where somebody has died, and the others write down what they have of its state
(train/recovery/crash_handoff.py)."""
LATE_STOP_SECONDS = 300.0
"""Once a process has saved and left, the others are not far; one that waits for something in vain is killed."""
EARLY_STOP_SECONDS = 10.0
"""Once a process left before it could listen to a stop, the others may wait for it in vain: they have this long."""
SPARE_STOP_SECONDS = 3.0
"""When the others are done, a spare process that has not heard of it (it stands still) has this long."""
SECOND_SIGNAL_SECONDS = 0.25
"""A wrapper (make, uv) may pass on the same Ctrl-C that the terminal sent us: two within this time are one."""
UNKILLABLE_SECONDS = 5.0
"""A process that waits in the kernel, for a disk or a device, cannot be killed. We leave after this long."""
DRAIN_SECONDS = 0.2
"""The last words of a process are in its pipe already; waiting for its end is only a courtesy."""
HEAD_START_SECONDS = 0.5
"""The peers of a process that crashed may notice before we do. A crash counts as this much earlier than we saw it."""


class RunOutcome(NamedTuple):
    """How a run ended."""

    exit_status: int
    failure: WorkerFailure | None = None
    stopped: bool = False  # somebody asked it to stop
    early: bool = False  # ... while a process could not listen: before its loop, or after it
    in_line: bool = False  # the last line on the screen has no end yet


def supervise(
    tasks: Sequence[WorkerSpec], *, screen: int | None = 1, say: bool = True, survival: ElasticLauncher | None = None
) -> RunOutcome:
    """Start the processes, rank by rank, and return when all are gone.

    Rank 0's output goes to the file descriptor `screen` as well (None: only to its log). What is said about the run
    as a whole goes to standard error, unless `say` is off. `survival`: what is done about deaths; None: nothing.
    """
    return _Supervisor(tasks, screen, say, survival).run()


class _Supervisor:
    def __init__(
        self, tasks: Sequence[WorkerSpec], screen: int | None, say: bool, survival: ElasticLauncher | None
    ) -> None:
        self.tasks, self.survival = tasks, survival
        self.voice = 0  # the process whose output goes to the screen
        self.say = say
        self.screen = screen
        self.last_byte = b"\n"  # of what is on the screen
        self.processes: list[WorkerProcess] = []
        self.selector = selectors.DefaultSelector()
        self.signals: list[int] = []
        self.stopped_at: float | None = None  # somebody asked us to stop
        self.impatient = False  # ... and then asked again
        self.left_early = False  # a process was told to stop when it could not listen
        self.kill_at: float | None = None
        self.look_at = 0.0
        self.failing = False
        self.only_spares = False  # who is still there could as well not be

    def run(self) -> RunOutcome:
        with self._listening():
            try:
                for task in self.tasks:
                    self._start(task)
                if self.survival is not None and self.survival.meeting is not None:
                    self.selector.register(self.survival.meeting.stdout, selectors.EVENT_READ, self.survival)  # type: ignore[arg-type]
                while any(process.alive for process in self.processes) and not self._unkillable():
                    self._poll()
            finally:
                self._end_all()
        outcome = self._outcome()
        return outcome._replace(in_line=self.screen is not None and self.last_byte != b"\n")

    def _start(self, task: WorkerSpec) -> None:
        process = WorkerProcess(len(self.processes), task)
        self.processes.append(process)
        self.selector.register(process.stdout, selectors.EVENT_READ, process)

    def _poll(self) -> None:
        """Wait for something to happen, or for a moment, and see to it."""
        for key, _ in self.selector.select(LOOK_SECONDS):
            if key.data is None:
                os.read(key.fd, 4096)  # only there to wake us
            elif key.data is self.survival:
                self._on_rendezvous_event(self.survival)
            elif not key.data.stdout.closed:  # it may have been buried in this very round
                self._forward(key.data)
        now = time.monotonic()
        if not self.signals and now < self.look_at:
            return  # only output; a process that writes a lot should not make us look at all the others each time
        self.look_at = now + LOOK_SECONDS
        while self.signals:
            self._on_signal(self.signals.pop(0))
        for process in self.processes:
            if process.alive and process.has_ended():
                self._reap(process)
        if not self.failing and any(
            p.failed() or (p.task.record.exists() and self._is_needed(p)) for p in self.processes
        ):
            self._end_the_others()
        alive = [process for process in self.processes if process.alive]
        if not any(process.joined for process in alive):  # whoever was to be joined is done
            for process in alive:
                process.kill()
        if alive and not self.only_spares and all(process.spare for process in alive):
            self.only_spares = True
            self.kill_at = min(self.kill_at or now + SPARE_STOP_SECONDS, now + SPARE_STOP_SECONDS)
        if self.kill_at is not None and now >= self.kill_at:
            self._kill_late()

    def _is_needed(self, process: WorkerProcess) -> bool:
        """Does it matter how this one ends? Not of a spare one, once the main process has left in peace."""
        main = self.processes[0]
        if not process.joined:
            return False
        return main.alive or main.popen.returncode != 0 or not process.spare

    def _kill_late(self) -> None:
        """Who was to leave has not left in time."""
        alive = [process for process in self.processes if process.alive and not process.killed]
        if alive and self.only_spares and not self.failing:
            ranks = ", ".join(str(process.rank) for process in alive)
            self._print(f"Killed: rank {ranks}, which stood still when the others were done.")
        elif alive and self.stopped_at is not None and not (self.left_early or self.impatient or self.failing):
            self.impatient = True
            ranks = ", ".join(str(process.rank) for process in alive)
            self._print(
                f"Killed: rank {ranks}, still there {LATE_STOP_SECONDS:g} seconds after the first one had left."
            )
        for process in alive:
            process.kill()

    def _unkillable(self) -> bool:
        """Somebody was killed and does not go: he waits in the kernel, for a disk or a device that does not answer."""
        return self.kill_at is not None and time.monotonic() > self.kill_at + UNKILLABLE_SECONDS

    def _forward(self, process: WorkerProcess) -> bool:
        """Pass on what the process wrote; False when there will be no more."""
        try:
            data = os.read(process.stdout.fileno(), 1 << 16)
        except BlockingIOError:
            return True
        if not data:
            self.selector.unregister(process.stdout)
            return False
        process.log.write(data)
        if process.log.lost is not None and not process.log_is_lost:
            process.log_is_lost = True
            self._print(f"The log {process.log.path} ends here: {process.log.lost.strerror}. The run goes on.")
        if process.rank == self.voice and self.screen is not None:
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(self.screen, view) :]
                self.last_byte = data[-1:]
            except OSError:  # the reader is gone, or the terminal; the logs go on
                self.screen = None
        return True

    def _on_signal(self, number: int) -> None:
        """Somebody wants us to stop."""
        if number == signal.SIGCHLD:
            return
        now = time.monotonic()
        if self.stopped_at is None:
            self.stopped_at = now
            if not self.failing:
                self._print("Stopping; a step that is under way is finished and saved. A second Ctrl-C kills at once.")
                for process in self.processes:
                    process.tell(group=False)
                if not all(process.alive for process in self.processes):
                    self.kill_at = now + LATE_STOP_SECONDS
        elif number != signal.SIGHUP and now - self.stopped_at > SECOND_SIGNAL_SECONDS:
            self.impatient = True
            self.kill_at = now

    def _reap(self, process: WorkerProcess) -> None:
        """A process is over: end what it started, read what is left in its pipe, and let it go."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.popen.pid, signal.SIGKILL)
        process.ended_at = time.time()
        process.popen.wait()
        self._drain(process)
        if process.spare and process.popen.returncode < 0 and not (process.told or process.killed or self.failing):
            number = signal.Signals(-process.popen.returncode)
            self._print(
                f"Rank {process.rank} of {len(self.tasks)} died of signal {number} ({number.name}); the others go on "
                f"without it. Its log is {process.task.log}"
            )
        if self.survival is not None:
            self._replace(process, self.survival)
        if not process.joined and process.popen.returncode and not (process.told or process.killed or self.failing):
            self._print(f"Process {process.rank} was to join, and did not. Its log is {process.task.log}")
        if self.stopped_at is not None and process.told and process.joined and not self.failing:
            early = process.popen.returncode == -signal.SIGTERM
            self.left_early |= early
            self.kill_at = self.kill_at or time.monotonic() + (EARLY_STOP_SECONDS if early else LATE_STOP_SECONDS)

    def _replace(self, process: WorkerProcess, survival: ElasticLauncher) -> None:
        """A process is over. If it died, and enough are left who can do without it, another one takes its place."""
        code, stopping = process.popen.returncode, self.failing or self.stopped_at is not None
        if code >= 0 or self.failing or not process.replaceable or process.task.record.exists():
            return
        done = [other for other in self.processes if other.joined and other.popen.returncode == 0]
        left = done + [other for other in self.processes if other.alive and other.joined]
        if process.joined and (len(left) < survival.minimum or not all(other.replaceable for other in left)):
            return
        process.missed = True
        if process.rank == self.voice and left:
            self.voice = left[0].rank
        if left and not done and not stopping and survival.may_replace(one_death=process.orphan_of is None):
            self._start(survival.build(len(self.processes), process.rank))

    def _on_rendezvous_event(self, survival: ElasticLauncher) -> None:
        """What the meeting place tells."""
        events = survival.heard()
        if events is None:
            assert survival.meeting is not None
            self.selector.unregister(survival.meeting.stdout)  # type: ignore[arg-type]
        for event in events or []:
            if "silent" in event:
                self._kill_silent(self.processes[event["silent"]], event.get("why", "gives no sign of life"))
            if "orphan" in event:
                process = self.processes[event["orphan"]]
                process.orphan_of, process.missed = event["lost"], process.alive
                process.kill()
            if "formed" in event:
                self._announce(event["formed"], max(survival.step, 0))

    def _kill_silent(self, process: WorkerProcess, why: str) -> None:
        """The others take it for dead, so it must be. Not by `kill`: it then counts as any death, so that the run ends,
        and may begin again, if all have died like this."""
        if process.alive:
            self._print(f"Process {process.rank} {why}: it is killed. Its log is {process.task.log}")
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.popen.pid, signal.SIGKILL)

    def _announce(self, formed: dict[str, Any], step: int) -> None:
        """Who died, and who has joined."""
        for number in formed["joined"]:
            self.processes[number].joined = True
            self._print(f"Process {number} has joined, after {step} steps: {len(formed['roster'])} go on.")
        for number in formed["lost"]:
            process = self.processes[number]
            deadline = time.monotonic() + GRACE_SECONDS  # its connections end a moment before it does
            while process.alive and not process.has_ended() and time.monotonic() < deadline:
                time.sleep(0.001)
            if process.alive and process.has_ended():
                self._reap(process)
            if process.orphan_of is not None:
                self._print(f"Process {number}, which shared its model, was ended. Its log is {process.task.log}")
                continue
            if self.failing or process.failed() or process.task.record.exists():
                continue  # nobody goes on: it is told as the run's failure, or the run has another one
            how = f"died of {signal.Signals(-code).name}" if (code := process.popen.returncode or 0) < 0 else "is gone"
            self._print(
                f"Process {number} {how} after {step} steps; {len(formed['roster'])} finish its step and go on. "
                f"Its log is {process.task.log}"
            )

    def _drain(self, process: WorkerProcess) -> None:
        """Pass on the last words and close everything. Somebody who left the process group may hold the pipe open."""
        deadline = time.monotonic() + DRAIN_SECONDS
        open_ = process.stdout in self.selector.get_map()
        while open_ and time.monotonic() < deadline:
            if _has_something(process.stdout, deadline - time.monotonic()):
                open_ = self._forward(process)
        if open_:
            self.selector.unregister(process.stdout)
        process.stdout.close()
        process.stdin.close()
        process.log.close()

    def _end_the_others(self) -> None:
        """Somebody failed, so nobody can go on."""
        self.failing = True
        died = any(-(process.popen.returncode or 0) in CRASHES for process in self.processes)
        bequeath = died and any(hands_off_shards(process.task.record) for process in self.processes)
        self.kill_at = time.monotonic() + (BEQUEST_SECONDS if bequeath else GRACE_SECONDS)
        for process in self.processes:
            if not process.task.record.exists():
                process.tell(group=True)

    def _end_all(self) -> None:
        """Nothing of ours stays, whatever happened here."""
        for process in self.processes:
            if process.alive:
                process.kill()
                try:
                    process.popen.wait(UNKILLABLE_SECONDS)
                except subprocess.TimeoutExpired:
                    self._print(f"Process {process.popen.pid} (rank {process.rank}) waits in the kernel and stays.")
                process.ended_at = time.time()
                self._drain(process)
        self.selector.close()

    def _outcome(self) -> RunOutcome:
        """Find the failure that came first, put every traceback into its log, and say what happened."""
        if not any(process.joined and process.popen.returncode == 0 for process in self.processes):
            survived = self._survived()
            for process in self.processes:
                process.missed &= process.rank in survived  # else nobody was left to go on
        return self._found()

    def _survived(self) -> set[int]:
        """Whose death others have put behind them. Not where somebody was lost with it who failed by himself: most
        likely of that death."""
        if self.survival is None:
            return set()
        self.survival.hear_out()
        failed = {p.rank for p in self.processes if p.task.record.exists() or (p.popen.returncode or 0) > 0}
        return {number for lost in self.survival.survived if not failed & set(lost) for number in lost}

    def _found(self) -> RunOutcome:
        failures = [failure for process in self.processes if (failure := self._failure_of(process))]
        for failure in failures:
            if failure.record is not None:
                with (
                    contextlib.suppress(OSError),
                    open(failure.log, "a", encoding="utf-8", errors="backslashreplace") as log,
                ):
                    log.write((failure.record.traceback or failure.record.message).rstrip("\n") + "\n")
        if self.impatient and not self.failing:
            return RunOutcome(1, stopped=True)
        if self.stopped_at is not None and (self.left_early or not failures):
            return RunOutcome(0, stopped=True, early=self.left_early)
        if not failures:
            return RunOutcome(0)
        # A process that lost a peer did not fail first, whatever the clock says.
        died = any(failure.signal in CRASHES for failure in failures)
        first = min(failures, key=lambda f: (f.record is not None and f.record.is_consequence(died), f.time))
        first = self._left_before(first) or first
        self._print(str(first))
        return RunOutcome(first.exit_status, first)

    def _left_before(self, failure: WorkerFailure) -> WorkerFailure | None:
        """Who lost a peer lost perhaps one that had left in peace."""
        if failure.record is None or failure.record.kind != "PeerLostError":
            return None
        for process in self.processes:
            left = clean_end_at(process.task.record)
            if left is None and process.popen.returncode == 0 and process.ended_at is not None:  # os._exit(0)
                left = process.ended_at - HEAD_START_SECONDS
            if left is not None and left < failure.time:
                size, log = len(self.tasks), process.task.log
                return WorkerFailure(process.rank, size, left, None, 0, failure.exit_status, log, early=True)
        return None

    def _failure_of(self, process: WorkerProcess) -> WorkerFailure | None:
        task, code, size = process.task, process.popen.returncode, len(self.tasks)
        record = read(task.record)
        if not self._is_needed(process):
            return None
        if record is not None:
            return WorkerFailure(process.rank, size, record.time, record, 0, record.exit_status, task.log)
        if not process.failed() or process.ended_at is None:
            return None
        seen = process.ended_at - (HEAD_START_SECONDS if -code in CRASHES else 0)
        return WorkerFailure(process.rank, size, seen, None, max(0, -code), code if code > 0 else 1, task.log)

    def _print(self, text: str) -> None:
        """A line of ours, on a line of its own."""
        if not self.say:
            return
        with contextlib.suppress(OSError, ValueError):
            if self.screen is not None and self.last_byte != b"\n":
                os.write(self.screen, b"\n")
                self.last_byte = b"\n"
            print(text, file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Signals go to `self.signals` and wake the loop. Only the main thread may listen; others just look around."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        wanted = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD]
        # Under nohup, or in the background of a shell script, a signal is ignored on purpose.
        wanted = [number for number in wanted if signal.getsignal(number) is not signal.SIG_IGN]
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        before = {number: signal.signal(number, lambda number, _: self.signals.append(number)) for number in wanted}
        self.selector.register(reader, selectors.EVENT_READ, None)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(wakeup)
            os.close(reader)
            os.close(writer)


def _has_something(file: IO[bytes], seconds: float) -> bool:
    """Is there something to read, or its end, within this time? (`select.select` knows no descriptor beyond 1023.)"""
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(max(seconds, 0.0) * 1000))
