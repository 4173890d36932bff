"""A process that the launcher has started: what it was to do, how it ended, and what there is to say about that."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from unisono.errors import WorldError
from unisono.launcher.failure_record import FailureRecord, is_replaceable, is_spare
from unisono.launcher.rank_log import RankLog, last_lines

MEANING = {
    signal.SIGKILL: "usually the machine had no memory left (`dmesg | tail` tells), or somebody killed it",
    signal.SIGSEGV: "a crash in compiled code: an extension, a driver, or libraries that do not fit together",
    signal.SIGABRT: "compiled code gave up: an assertion, or an exception that nobody caught",
    signal.SIGBUS: "usually no room in shared memory (`df -h /dev/shm` tells) or on a disk",
    signal.SIGILL: "compiled code for another kind of processor",
    signal.SIGFPE: "an arithmetic error in compiled code",
    signal.SIGTERM: "somebody ended this one process (`kill`), not the launcher",
    signal.SIGINT: "somebody interrupted this one process, not the launcher",
}
CRASHES = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
"""Signals that a process does not die of because a peer failed. SIGABRT is not one of them: gloo may do that."""


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """A process to start."""

    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    record: Path
    substitute: bool = False  # for a process that died


class WorkerFailure(NamedTuple):
    """Why a run failed."""

    rank: int
    size: int
    time: float  # seconds since the epoch
    record: FailureRecord | None  # None: the process left no word
    signal: int  # that it died of, 0: none
    exit_status: int  # what the launcher should return
    log: Path
    early: bool = False  # it said that all was well, when the others still needed it

    @property
    def is_wrong_request(self) -> bool:
        """Whether the processes refused the request before they computed anything."""
        return self.record is not None and self.record.exit_status == 2 and bool(self.record.problems)

    def __str__(self) -> str:
        """What is printed last on the screen."""
        record = self.record
        if record is not None and self.is_wrong_request:
            return record.message  # a wrong request needs no traceback
        title = f"Rank {self.rank} of {self.size}" if self.rank < self.size else f"Process {self.rank}, which joined,"
        if record is not None:
            return f"{title} failed; its log is {self.log}\n\n{record.traceback or record.message}".rstrip("\n")
        if self.early:
            said = f"{title} left with exit status 0 (sys.exit? os._exit?) while the others still needed it."
        elif self.signal:
            meaning = MEANING.get(signal.Signals(self.signal), "")
            said = f"{title} died of signal {self.signal} ({signal.Signals(self.signal).name})"
            said += f": {meaning}." if meaning else "."
        else:
            said = f"{title} left with exit status {self.exit_status} and no word (os._exit?)."
        tail = last_lines(self.log, 10)
        if tail:
            return "\n".join([said, f"The end of its log, {self.log}:", *(f"    {line}" for line in tail)])
        return f"{said}\nIts log is empty: {self.log}"


class WorkerProcess:
    """A process that was started, and what we know of it."""

    def __init__(self, rank: int, task: WorkerSpec) -> None:
        self.rank = rank
        self.task = task
        self.log = RankLog(task.log)
        self.told = False  # we sent it SIGTERM
        self.killed = False  # we sent it SIGKILL
        self.log_is_lost = False  # and we said so
        self.ended_at: float | None = None
        self.joined = not task.substitute  # is it one of those who train, or has it only been started to join them?
        self.missed = False  # it died, and the others go on without it
        self.orphan_of: int | None = None  # it was ended since this one died, with which it shared a model
        try:
            self.popen = subprocess.Popen(
                task.command,
                env=task.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            self.log.close()
            do = "Start fewer processes, or close other programs."
            raise WorldError(f"Start process {rank}.", f"The system says: {error.strerror}.", do) from error
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        self.stdin, self.stdout = self.popen.stdin, self.popen.stdout
        os.set_blocking(self.stdout.fileno(), False)

    @property
    def alive(self) -> bool:
        return self.ended_at is None

    def tell(self, group: bool) -> None:
        """SIGTERM, to the process alone (it saves, with the help of its workers) or to all that it started."""
        self.told = True
        if self.alive:
            (os.killpg if group else os.kill)(self.popen.pid, signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, to all that it started."""
        if self.alive:
            self.killed = True
            os.killpg(self.popen.pid, signal.SIGKILL)

    def has_ended(self) -> bool:
        """Look whether it is over, without forgetting it: as long as it is not reaped its group's number is its own."""
        return os.waitid(os.P_PID, self.popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    @property
    def replaceable(self) -> bool:
        """Can the others go on, and finish its step, should it die?"""
        return not self.joined or is_replaceable(self.task.record)

    @property
    def spare(self) -> bool:
        """Do the others go on without it?"""
        return is_spare(self.task.record)

    def failed(self) -> bool:
        """Is it over, and not as it should be?"""
        code = self.popen.returncode
        if not self.alive and ((code < 0 and self.spare) or self.missed or not self.joined):
            return False
        return not self.alive and code != 0 and not self.killed and not (self.told and code == -signal.SIGTERM)
