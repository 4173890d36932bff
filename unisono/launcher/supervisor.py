"""Supervise the processes of a run, on this host and on others: their output, their failures, their end.

    launcher ──stdin (ends when the launcher dies)──▶ process ──stdout+stderr──▶ launcher ──▶ log/rank-N.log
                                                         │                          └─(rank 0)─▶ the screen
                                                         └──rank-N.json, the moment an exception leaves the script

One thread, one loop, no torch. Every process has a session and a process group of its own, so that a Ctrl-C reaches
only the launcher, and so that whatever a process started ends with it. The rules:

- The earliest failure is *the* failure. The other processes get SIGTERM, and SIGKILL a moment later, and the traceback
  of the failed rank is the last thing on the screen.
- The first Ctrl-C, SIGTERM or SIGHUP makes every process save and end; a second Ctrl-C or SIGTERM kills them at once.
  When the first process has ended, the others have five minutes.
- In an elastic run (elastic_policy.py) a death by a signal is reported and is no failure, as long as enough processes
  remain; a replacement is started. The output of the oldest living process goes to the screen. A death that the others
  report as survived is never the cause of a later failure.
- Some processes declare themselves spare (failure_record.py): the others continue without them. The death of one is
  reported, and only an exception of its script is a failure. When the others have ended, spare ones have a moment left.
- No process outlives the launcher: when it is gone, standard input ends in every process, which then ends itself.
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
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple

from unisono.config.wording import plural
from unisono.environment import status_of_stop
from unisono.launcher.elastic_policy import ElasticLauncher
from unisono.launcher.failure_record import clean_end_at, hands_off_shards, read
from unisono.launcher.rank_log import append_failure
from unisono.launcher.worker_process import CRASHES, WorkerFailure, WorkerProcess, WorkerSpec

__all__ = ["WorkerFailure", "RunOutcome", "WorkerSpec", "supervise"]

POLL_SECONDS = 0.1
"""Seconds between two checks for failure records. Exits and output wake the loop at once."""
GRACE_SECONDS = 0.4
"""Seconds for the output of the other processes after a failure. The traceback must appear within a second."""
HANDOFF_SECONDS = 30.0
"""This time after a death if the other processes write their shards to disk (train/recovery/crash_handoff.py)."""
LATE_STOP_SECONDS = 300.0
"""Seconds that the others may run after a stop request, once the first process has saved and ended."""
EARLY_STOP_SECONDS = 10.0
"""This time if a process ended before it could handle the request: the others may wait for it in vain."""
SPARE_STOP_SECONDS = 3.0
"""Seconds that a spare process may run after all others have ended."""
SECOND_SIGNAL_SECONDS = 0.25
"""Two signals within this time count as one: a wrapper (make, uv) may forward the terminal's Ctrl-C."""
UNKILLABLE_SECONDS = 5.0
"""Time limit for killed processes. A process that waits in the kernel, for a disk or a device, does not end."""
DRAIN_SECONDS = 0.2
"""Time limit for reading the pipe of an ended process. Its output is there; only its end may be missing."""
HEAD_START_SECONDS = 0.5
"""A crash is dated this much earlier than its detection: its peers may fail before the launcher detects it."""


class RunOutcome(NamedTuple):
    """The end of a run.

    Attributes:
        exit_status: the exit status of the launcher.
        failure: the cause of a failure.
        stopped: whether a signal requested the stop.
        early: whether a process could not handle that request, before its loop or after it.
        in_line: whether the last line on the screen is unfinished.
    """

    exit_status: int
    failure: WorkerFailure | None = None
    stopped: bool = False
    early: bool = False
    in_line: bool = False

    @property
    def final_status(self) -> int:
        """The exit status of the command: an engine may need to know that a run was stopped, and is not complete."""
        return self.exit_status or (status_of_stop() if self.stopped else 0)


def supervise(
    specs: Sequence[WorkerSpec], *, screen: int | None = 1, verbose: bool = True, elastic: ElasticLauncher | None = None
) -> RunOutcome:
    """Start the processes, rank by rank, and return when all have ended.

    Args:
        specs: the processes.
        screen: the file descriptor for rank 0's output; None: it goes to its log only.
        verbose: whether messages about the run go to standard error.
        elastic: replaces dead processes; None: a death ends the run.
    """
    return _Supervisor(specs, screen, verbose, elastic).run()


def record_refusals(processes: Sequence[WorkerProcess], events: Sequence[Mapping[str, Any]]) -> None:
    """Record processes that may not continue, and connections that a process has refused."""
    for event in events:
        if "refused" in event:
            processes[event["process"]].record("refusal", reason=event["refused"])
        if "refusal" in event:
            processes[event["number"]].record("refusal", reason=event["refusal"])


class _Supervisor:
    def __init__(
        self, specs: Sequence[WorkerSpec], screen: int | None, verbose: bool, elastic: ElasticLauncher | None
    ) -> None:
        self.specs, self.elastic = specs, elastic
        self.on_screen = 0  # the process whose output goes to the screen
        self.verbose = verbose
        self.screen = screen
        self.last_byte = b"\n"  # on the screen
        self.processes: list[WorkerProcess] = []
        self.selector = selectors.DefaultSelector()
        self.signals: list[int] = []
        self.stopped_at: float | None = None  # when a signal requested a stop
        self.killing = False  # a second signal requested to kill all processes
        self.ended_early = False  # a process got the stop request when it could not handle it
        self.kill_at: float | None = None
        self.poll_at = 0.0
        self.failing = False
        self.only_spares = False  # only spare processes are alive

    def run(self) -> RunOutcome:
        with self._handle_signals():
            try:
                for spec in self.specs:
                    self._start(spec)
                if self.elastic is not None and self.elastic.server is not None:
                    self.selector.register(self.elastic.server.stdout, selectors.EVENT_READ, self.elastic)  # type: ignore[arg-type]
                while any(process.alive for process in self.processes) and not self._unkillable():
                    self._poll()
            finally:
                self._end_all()
        outcome = self._outcome()
        return outcome._replace(in_line=self.screen is not None and self.last_byte != b"\n")

    def _start(self, spec: WorkerSpec) -> None:
        process = WorkerProcess(len(self.processes), spec)
        self.processes.append(process)
        self.selector.register(process.handle.stdout, selectors.EVENT_READ, process)

    def _poll(self) -> None:
        """Wait for an event or for POLL_SECONDS, and handle the events."""
        for key, _ in self.selector.select(POLL_SECONDS):
            if key.data is None:
                os.read(key.fd, 4096)  # written by the signal handler to wake the loop
            elif key.data is self.elastic:
                self._on_rendezvous_event(self.elastic)
            elif not key.data.handle.stdout.closed:  # it may have been reaped in this iteration
                self._forward(key.data)
        now = time.monotonic()
        if not self.signals and now < self.poll_at:
            return  # only output: a process that writes a lot must not cause a check of all processes each time
        self.poll_at = now + POLL_SECONDS
        while self.signals:
            self._on_signal(self.signals.pop(0))
        for process in self.processes:
            if process.alive and process.handle.has_ended():
                self._reap(process)
        if not self.failing and any(
            p.failed() or (p.spec.record.exists() and self._is_needed(p)) for p in self.processes
        ):
            self._terminate_others()
        alive = [process for process in self.processes if process.alive]
        if not any(process.joined for process in alive):  # the processes that a replacement would join have ended
            for process in alive:
                process.kill()
        if alive and not self.only_spares and all(process.spare for process in alive):
            self.only_spares = True
            self.kill_at = min(self.kill_at or now + SPARE_STOP_SECONDS, now + SPARE_STOP_SECONDS)
        if self.kill_at is not None and now >= self.kill_at:
            self._kill_late()

    def _is_needed(self, process: WorkerProcess) -> bool:
        """Return whether a failure of this process matters: not of a spare one, after the main one has succeeded."""
        main = self.processes[0]
        if not process.joined:
            return False
        return main.alive or main.code != 0 or not process.spare

    def _kill_late(self) -> None:
        """Kill the processes that have not ended in time."""
        alive = [process for process in self.processes if process.alive and not process.killed]
        if alive and self.only_spares and not self.failing:
            ranks = ", ".join(str(process.rank) for process in alive)
            self._print(f"Killed rank {ranks}: it was still running when the other processes had ended.")
        elif alive and self.stopped_at is not None and not (self.ended_early or self.killing or self.failing):
            self.killing = True
            ranks = ", ".join(str(process.rank) for process in alive)
            self._print(
                f"Killed rank {ranks}: it was still running {LATE_STOP_SECONDS:g} seconds after the first process had "
                "ended."
            )
        for process in alive:
            process.kill()

    def _unkillable(self) -> bool:
        """Return whether a killed process does not end, because it waits in the kernel for a disk or a device."""
        return self.kill_at is not None and time.monotonic() > self.kill_at + UNKILLABLE_SECONDS

    def _forward(self, process: WorkerProcess) -> bool:
        """Forward the output of a process. Return False at its end."""
        try:
            data = os.read(process.handle.stdout.fileno(), 1 << 16)
        except BlockingIOError:
            return True
        if not data:
            self.selector.unregister(process.handle.stdout)
            return False
        process.log.write(data)
        if process.log.error is not None and not process.log_error_reported:
            process.log_error_reported = True
            self._print(f"Cannot write the log {process.log.path}: {process.log.error.strerror}. The run continues.")
        if process.rank == self.on_screen and self.screen is not None:
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(self.screen, view) :]
                self.last_byte = data[-1:]
            except OSError:  # the reader or the terminal is gone; the logs continue
                self.screen = None
        return True

    def _on_signal(self, number: int) -> None:
        """Stop the run at the first signal; kill it at the second."""
        if number == signal.SIGCHLD:
            return
        now = time.monotonic()
        if self.stopped_at is None:
            self.stopped_at = now
            self.specs[0].audit("stop", signal=signal.Signals(number).name)
            if not self.failing:
                self._print("Stopping: the current step is finished and saved. A second Ctrl-C kills all processes.")
                for process in self.processes:
                    process.terminate(group=False)
                if not all(process.alive for process in self.processes):
                    self.kill_at = now + LATE_STOP_SECONDS
        elif number != signal.SIGHUP and now - self.stopped_at > SECOND_SIGNAL_SECONDS:
            self.killing = True
            self.kill_at = now

    def _reap(self, process: WorkerProcess) -> None:
        """Handle the end of a process: kill its children, read the rest of its output, and report a death."""
        process.handle.signal(signal.SIGKILL, group=True)
        process.ended_at = time.time()
        process.handle.wait()
        self._drain(process)
        if process.spare and process.code < 0 and not (process.terminated or process.killed or self.failing):
            number = signal.Signals(-process.code)
            self._print(
                f"Rank {process.rank} of {len(self.specs)} died of signal {number} ({number.name}); the others "
                f"continue without it. Its log is {process.spec.log}"
            )
        if self.elastic is not None:
            self._replace(process, self.elastic)
        if not process.joined and process.code and not (process.terminated or process.killed or self.failing):
            self._print(f"Replacement process {process.rank} failed to join. Its log is {process.spec.log}")
        if self.stopped_at is not None and process.terminated and process.joined and not self.failing:
            early = process.code == -signal.SIGTERM
            self.ended_early |= early
            self.kill_at = self.kill_at or time.monotonic() + (EARLY_STOP_SECONDS if early else LATE_STOP_SECONDS)

    def _replace(self, process: WorkerProcess, elastic: ElasticLauncher) -> None:
        """Replace an ended process if it died, and if enough processes remain that can continue without it."""
        code, stopping = process.code, self.failing or self.stopped_at is not None
        if code >= 0 or self.failing or not process.replaceable or process.spec.record.exists():
            return
        done = [other for other in self.processes if other.joined and other.code == 0]
        remaining = done + [other for other in self.processes if other.alive and other.joined]
        if process.joined and (len(remaining) < elastic.minimum or not all(other.replaceable for other in remaining)):
            return
        process.survived = True
        if process.rank == self.on_screen and remaining:
            self.on_screen = remaining[0].rank
        if remaining and not done and not stopping and elastic.may_replace(new_death=process.orphan_of is None):
            self._start(elastic.build(len(self.processes), process.rank))

    def _on_rendezvous_event(self, elastic: ElasticLauncher) -> None:
        events = elastic.read_events()
        if events is None:
            assert elastic.server is not None
            self.selector.unregister(elastic.server.stdout)  # type: ignore[arg-type]
        for event in events or []:
            if "silent" in event:
                self._kill_silent(self.processes[event["silent"]], event.get("why", "sends no heartbeat"))
            if "orphan" in event:
                process = self.processes[event["orphan"]]
                process.orphan_of = event["lost"]
                process.survived = process.survived or process.alive  # it may have died with the host of both
                process.kill()
            if "formed" in event:
                self._announce(event["formed"], max(elastic.step, 0))
        record_refusals(self.processes, events or [])

    def _kill_silent(self, process: WorkerProcess, why: str) -> None:
        """Kill a process that the others count as dead.

        Not with `process.kill`: this must count as any death, so that the run ends, and may be restarted, if all
        processes die like this.
        """
        if process.alive:
            self._print(f"Process {process.rank} {why} and is killed. Its log is {process.spec.log}")
            process.handle.signal(signal.SIGKILL, group=True)

    def _announce(self, formed: dict[str, Any], step: int) -> None:
        """Report which processes were lost and which have joined."""
        remaining = plural(len(formed["roster"]), "process", "processes")
        for number in formed["joined"]:
            self.processes[number].joined = True
            self.processes[number].record("join", after_step=step)
            self._print(f"Process {number} joined after {step} steps; the run continues with {remaining}.")
        for number in formed["lost"]:
            process = self.processes[number]
            deadline = time.monotonic() + GRACE_SECONDS  # its connections end a moment before it does
            while process.alive and not process.handle.has_ended() and time.monotonic() < deadline:
                time.sleep(0.001)
            if process.alive and process.handle.has_ended():
                self._reap(process)
            if process.orphan_of is not None:
                self._print(
                    f"Process {number} was killed too: it shared a model with the dead process. "
                    f"Its log is {process.spec.log}"
                )
                continue
            if self.failing or process.failed() or process.spec.record.exists():
                continue  # the run ends, with this as its failure or with another one
            how = f"died of {signal.Signals(-code).name}" if (code := process.code or 0) < 0 else "is gone"
            self._print(
                f"Process {number} {how} after {step} steps; the run continues with {remaining}. "
                f"Its log is {process.spec.log}"
            )

    def _drain(self, process: WorkerProcess) -> None:
        """Forward the rest of the output and close all files. A child of the process may still hold the pipe open."""
        deadline = time.monotonic() + DRAIN_SECONDS
        stdout = process.handle.stdout
        open_ = stdout in self.selector.get_map()
        while open_ and time.monotonic() < deadline:
            if _is_readable(stdout, deadline - time.monotonic()):
                open_ = self._forward(process)
        if open_:
            self.selector.unregister(stdout)
        process.handle.close()
        process.log.close(process.ending)
        process.record_end()

    def _terminate_others(self) -> None:
        """End all processes after a failure."""
        self.failing = True
        died = any(-(process.code or 0) in CRASHES for process in self.processes)
        handoff = died and any(hands_off_shards(process.spec.record) for process in self.processes)
        self.kill_at = time.monotonic() + (HANDOFF_SECONDS if handoff else GRACE_SECONDS)
        for process in self.processes:
            if not process.spec.record.exists():
                process.terminate(group=True)

    def _end_all(self) -> None:
        """Kill all remaining processes, also after an exception in the supervisor."""
        for process in self.processes:
            if process.alive:
                process.kill()
                try:
                    process.handle.wait(UNKILLABLE_SECONDS)
                except subprocess.TimeoutExpired:
                    self._print(f"Cannot kill rank {process.rank}{process.handle.where}: it waits in the kernel.")
                process.ended_at = time.time()
                self._drain(process)
        self.selector.close()

    def _outcome(self) -> RunOutcome:
        """Find the first failure, append every traceback to its log, and print the failure."""
        if not any(process.joined and process.code == 0 for process in self.processes):
            survived = self._survived()
            for process in self.processes:
                process.survived &= process.rank in survived  # else no process was left to continue
        return self._first_failure()

    def _survived(self) -> set[int]:
        """Return the processes whose deaths others have survived.

        A death does not count if a process that was lost with it failed by an error, which that death most likely
        caused.
        """
        if self.elastic is None:
            return set()
        record_refusals(self.processes, self.elastic.drain())
        failed = {p.rank for p in self.processes if p.spec.record.exists() or (p.code or 0) > 0}
        return {number for lost in self.elastic.survived if not failed & set(lost) for number in lost}

    def _first_failure(self) -> RunOutcome:
        failures = [failure for process in self.processes if (failure := self._failure_of(process))]
        for failure in failures:
            if failure.record is not None:
                append_failure(failure.log, failure.record.traceback or failure.record.message, failure.time)
        if self.killing and not self.failing:
            return RunOutcome(1, stopped=True)
        if self.stopped_at is not None and (self.ended_early or not failures):
            return RunOutcome(0, stopped=True, early=self.ended_early)
        if not failures:
            return RunOutcome(0)
        # A process that lost a peer did not fail first, whatever the times say.
        died = any(failure.signal in CRASHES for failure in failures)
        first = min(failures, key=lambda f: (f.record is not None and f.record.is_consequence(died), f.time))
        first = self._early_end_before(first) or first
        self._print(str(first))
        return RunOutcome(first.exit_status, first)

    def _early_end_before(self, failure: WorkerFailure) -> WorkerFailure | None:
        """Return the early end of a process that caused this failure: a lost peer may have exited with status 0."""
        if failure.record is None or failure.record.kind != "PeerLostError":
            return None
        for process in self.processes:
            ended = clean_end_at(process.spec.record)
            if ended is None and process.code == 0 and process.ended_at is not None:  # os._exit(0)
                ended = process.ended_at - HEAD_START_SECONDS
            if ended is not None and ended < failure.time:
                size, log = len(self.specs), process.spec.log
                return WorkerFailure(process.rank, size, ended, None, 0, failure.exit_status, log, early=True)
        return None

    def _failure_of(self, process: WorkerProcess) -> WorkerFailure | None:
        spec, code, size = process.spec, process.code, len(self.specs)
        record = read(spec.record)
        if not self._is_needed(process):
            return None
        if record is not None:
            return WorkerFailure(process.rank, size, record.time, record, 0, record.exit_status, spec.log)
        if not process.failed() or process.ended_at is None:
            return None
        seen = process.ended_at - (HEAD_START_SECONDS if -code in CRASHES else 0)
        return WorkerFailure(process.rank, size, seen, None, max(0, -code), code if code > 0 else 1, spec.log)

    def _print(self, text: str) -> None:
        """Print a message about the run on a line of its own."""
        if not self.verbose:
            return
        with contextlib.suppress(OSError, ValueError):
            if self.screen is not None and self.last_byte != b"\n":
                os.write(self.screen, b"\n")
                self.last_byte = b"\n"
            print(text, file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def _handle_signals(self) -> Iterator[None]:
        """Append signals to `self.signals` and wake the loop. Python allows that in the main thread only."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        wanted = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD]
        # Under nohup, or in the background of a shell script, a signal is ignored intentionally.
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


def _is_readable(file: IO[bytes], seconds: float) -> bool:
    """Return whether the file becomes readable within this time. (`select.select` fails for descriptors over 1023.)"""
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(max(seconds, 0.0) * 1000))
