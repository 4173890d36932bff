"""A process that the launcher starts: its specification, its end, and the message about its failure."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

from unisono.errors import WorldError
from unisono.launcher.failure_record import FailureRecord, is_replaceable, is_spare
from unisono.launcher.rank_log import RankLog, last_lines
from unisono.security.audit_trail import Record, unrecorded

SIGNAL_CAUSES = {
    signal.SIGKILL: "usually the machine ran out of memory (see `dmesg | tail`), or the process was killed on purpose",
    signal.SIGSEGV: "a crash in compiled code: an extension, a driver, or incompatible libraries",
    signal.SIGABRT: "compiled code aborted: a failed assertion or an uncaught exception",
    signal.SIGBUS: "usually no space in shared memory (see `df -h /dev/shm`) or on a disk",
    signal.SIGILL: "compiled code for another kind of processor",
    signal.SIGFPE: "an arithmetic error in compiled code",
    signal.SIGTERM: "this process alone was terminated (`kill`), not by the launcher",
    signal.SIGINT: "this process alone was interrupted, not by the launcher",
}
CRASHES = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
"""Signals that are never the consequence of a lost peer. (SIGABRT may be: gloo aborts.)"""


class Handle(Protocol):
    """A process that runs, here or on another host.

    Attributes:
        stdout: its output, in a pipe that does not block.
        returncode: its exit status, negative for a signal, once `wait` has returned.
        where: " on HOST" for a process on another host, for messages.
    """

    where: str

    @property
    def stdout(self) -> IO[bytes]: ...

    @property
    def returncode(self) -> int | Any: ...

    def has_ended(self) -> bool:
        """Return whether it has ended, without reaping it: until then the id of its process group is not reused."""

    def wait(self, seconds: float | None = None) -> int:
        """Reap the process and return its exit status. Raises subprocess.TimeoutExpired."""

    def signal(self, number: int, *, group: bool) -> None:
        """Send a signal to the process, or to all that it has started."""

    def close(self) -> None:
        """Close all pipes."""


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """A process to start.

    Attributes:
        command: the program and its arguments.
        environment: all environment variables.
        log: the file for its output.
        record: the file for its failure (failure_record.py).
        replacement: whether it replaces a process that died.
        start: starts it, on this host or on another one (hosts/remote_host.py). Raises OSError if that fails.
        audit: records that it joins and leaves.
        place: where it runs, for this record: its host, and the address of another host.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    record: Path
    replacement: bool = False
    start: Callable[[WorkerSpec], Handle] = field(default_factory=lambda: LocalHandle)
    audit: Record = unrecorded
    place: Mapping[str, str] = field(default_factory=dict)


class LocalHandle:
    """A process on this host.

    Args:
        spec: its specification.
    """

    where = ""

    def __init__(self, spec: WorkerSpec) -> None:
        self._popen = subprocess.Popen(
            spec.command,
            env=spec.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            start_new_session=True,
        )
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._stdin, self.stdout = self._popen.stdin, self._popen.stdout
        self._pid = self._popen.pid
        os.set_blocking(self.stdout.fileno(), False)

    @property
    def returncode(self) -> int | Any:
        return self._popen.returncode

    def has_ended(self) -> bool:
        return os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def wait(self, seconds: float | None = None) -> int:
        return self._popen.wait(seconds)

    def signal(self, number: int, *, group: bool) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            (os.killpg if group else os.kill)(self._pid, number)

    def close(self) -> None:
        self.stdout.close()
        self._stdin.close()


class WorkerFailure(NamedTuple):
    """The cause of a failed run.

    Attributes:
        rank: the rank of the process that failed first.
        size: the number of processes at the start.
        time: the time of the failure, in seconds since the epoch.
        record: the exception; None if the process left none.
        signal: the signal that killed it; 0: none.
        exit_status: the exit status of the launcher.
        log: its log.
        early: whether it ended without an error while the others still needed it.
    """

    rank: int
    size: int
    time: float
    record: FailureRecord | None
    signal: int
    exit_status: int
    log: Path
    early: bool = False

    @property
    def is_wrong_request(self) -> bool:
        """Whether the processes refused the request before they computed anything."""
        return self.record is not None and self.record.exit_status == 2 and bool(self.record.problems)

    @property
    def is_death(self) -> bool:
        """Whether a process died by a signal of CRASHES, rather than failed with an exception.

        PeerLostError is the exception of a process that could not continue without one that died.
        """
        return self.signal in CRASHES or (self.record is not None and self.record.kind == "PeerLostError")

    def __str__(self) -> str:
        """Return the message that is printed last on the screen."""
        record = self.record
        if record is not None and self.is_wrong_request:
            return record.message  # an invalid request needs no traceback
        title = f"Rank {self.rank} of {self.size}" if self.rank < self.size else f"Process {self.rank}, a replacement,"
        if record is not None:
            return f"{title} failed; its log is {self.log}\n\n{record.traceback or record.message}".rstrip("\n")
        if self.early:
            message = f"{title} exited with status 0 (sys.exit? os._exit?) while other processes still needed it."
        elif self.signal:
            cause = SIGNAL_CAUSES.get(signal.Signals(self.signal), "")
            message = f"{title} died of signal {self.signal} ({signal.Signals(self.signal).name})"
            message += f": {cause}." if cause else "."
        else:
            message = f"{title} exited with status {self.exit_status} and no error message (os._exit?)."
        tail = last_lines(self.log, 10)
        if tail:
            return "\n".join([message, f"The end of its log, {self.log}:", *(f"    {line}" for line in tail)])
        return f"{message}\nIts log is empty: {self.log}"


class WorkerProcess:
    """A process that was started.

    Attributes:
        rank: its number, which is its rank at the start.
        spec: its specification.
        log: the log of its output.
        terminated: whether the launcher sent it SIGTERM.
        killed: whether the launcher sent it SIGKILL.
        log_error_reported: whether an error of the log was printed.
        ended_at: the time of its end, in seconds since the epoch; None: it is alive.
        joined: whether it trains; False for a replacement that has not joined yet.
        survived: whether it died and the others continue without it.
        orphan_of: the dead process with which it shared a model, for which it was killed.
    """

    def __init__(self, rank: int, spec: WorkerSpec) -> None:
        self.rank, self.spec = rank, spec
        self.log = RankLog(spec.log)
        self.terminated = self.killed = self.log_error_reported = False
        self.ended_at: float | None = None
        self.joined = not spec.replacement
        self.survived = False
        self.orphan_of: int | None = None
        try:
            self.handle: Handle = spec.start(spec)
        except OSError as error:
            self.log.close()
            raise WorldError(
                f"Cannot start process {rank}.",
                f"The system refused: {error.strerror}.",
                "start fewer processes, or close other programs.",
            ) from error

        if self.joined:
            self.record("join")

    def record(self, event: str, **facts: Any) -> None:
        """Record an event of this process."""
        self.spec.audit(event, process=self.rank, **self.spec.place, **facts)

    def record_end(self) -> None:
        """Record that it left, or that it is lost, and how it ended."""
        ending = self.ending
        self.record("loss" if ending.startswith(("died", "failed")) else "leave", reason=ending or "it does not end")

    @property
    def alive(self) -> bool:
        return self.ended_at is None

    def terminate(self, group: bool) -> None:
        """Send SIGTERM to the process alone (it saves, with the help of its workers), or to all that it started."""
        self.terminated = True
        if self.alive:
            self.handle.signal(signal.SIGTERM, group=group)

    def kill(self) -> None:
        """Send SIGKILL to the process and to all that it started."""
        if self.alive:
            self.killed = True
            self.handle.signal(signal.SIGKILL, group=True)

    @property
    def code(self) -> int | Any:
        """Its exit status, negative for a signal; None: it was not reaped."""
        return self.handle.returncode

    @property
    def replaceable(self) -> bool:
        """Whether the others can finish its step and continue if it dies."""
        return not self.joined or is_replaceable(self.spec.record)

    @property
    def spare(self) -> bool:
        """Whether the others continue without it."""
        return is_spare(self.spec.record)

    @property
    def ending(self) -> str:
        """How it ended, for the last mark of its log (rank_log.py); "" if that is not known."""
        code = self.code
        if code is None:
            return ""
        if self.spec.record.exists():
            word = "failed"
        elif self.terminated or self.killed:
            word = "stopped"
        else:
            word = "died" if code else "ended"
        return f"{word} {code}"

    def failed(self) -> bool:
        """Return whether it has ended with a failure."""
        code = self.code
        if not self.alive and ((code < 0 and self.spare) or self.survived or not self.joined):
            return False
        return not self.alive and code != 0 and not self.killed and not (self.terminated and code == -signal.SIGTERM)
