"""Watch the processes of a run in a thread of the launcher: read their status files, and act when the run hangs.

The thread is not part of the processes' group and needs no answer from them. So it also detects a process that is
stopped, or whose interpreter lock is held. To end a run it writes the failure record of a rank that is to blame. For
the supervisor (supervisor.py) this is a record like any other: it ends the other processes, and prints the table last.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from unisono.launcher import failure_record
from unisono.launcher.hang_report import HangDiagnosis, ReportBackoff, judge
from unisono.launcher.status_file import ProcessStatus, cpu_seconds, line_of_silent, now, read, stacks_path, state_of

POLL_SECONDS = 0.5
"""Seconds between two reads of all status files."""


class HangWatcher:
    """Watch the processes with status files in `folder` while a block runs.

    Args:
        folder: the launcher's private folder.
        verbose: report hangs on standard error that do not end the run.
    """

    def __init__(self, folder: Path, *, verbose: bool = True) -> None:
        self.folder, self.verbose = folder, verbose
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hang watcher", daemon=True)
        self._backoff = ReportBackoff()
        self._cpu_seconds: dict[int, tuple[float, float]] = {}  # of silent processes, by id: first time, CPU seconds

    def __enter__(self) -> HangWatcher:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(POLL_SECONDS):
            statuses = dict(self._read_statuses())
            diagnosis = judge(list(statuses.values())) if statuses else None
            if diagnosis is None:
                self._backoff.reset()
                continue
            if any(status.silent for status in statuses.values()):
                diagnosis = judge(list(self._locate_silent(statuses))) or diagnosis
            if diagnosis.then == "end" or (diagnosis.then == "kill" and not diagnosis.guilty):
                self._end(statuses, diagnosis)
                return
            if self._backoff.is_due(min(status.idle for status in statuses.values())) and self.verbose:
                with contextlib.suppress(OSError, ValueError):
                    print(f"\n{diagnosis.error}", file=sys.stderr, flush=True)
            if diagnosis.then == "kill":
                self._kill([status for status in statuses.values() if status.rank in diagnosis.guilty])

    def _read_statuses(self) -> Iterator[tuple[Path, ProcessStatus]]:
        """Yield the status of every running process; of a silent one its last status, marked as silent."""
        for path in sorted(self.folder.glob("rank-*.status")):
            record = path.with_suffix(".json")
            status = read(path)
            if status is None or not _is_running(status.pid):
                continue
            if record.exists() or failure_record.clean_end_at(record) is not None:
                continue
            silence = now() - status.written
            if silence > status.silence_limit:
                used = cpu_seconds(status.pid)
                began, used_then = self._cpu_seconds.setdefault(status.pid, (time.monotonic(), used))
                span = time.monotonic() - began
                share = (used - used_then) / span if span > POLL_SECONDS / 2 else None
                status = replace(status, idle=status.idle + silence, silent=state_of(status.pid), waits="", share=share)
            else:
                self._cpu_seconds.pop(status.pid, None)
            yield path, status

    def _locate_silent(self, statuses: dict[Path, ProcessStatus]) -> Iterator[ProcessStatus]:
        """Yield the statuses of the silent processes with their current line, if it can be determined."""
        for path, status in statuses.items():
            if not status.silent:
                yield status
                continue
            line = line_of_silent(status.pid, stacks_path(path), status.thread)
            yield replace(status, where=line or status.where, code="" if line else status.code)

    def _kill(self, guilty: Sequence[ProcessStatus]) -> None:
        """Kill processes and all that they have started. For the supervisor these are deaths like any other."""
        for status in guilty:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(status.pid, signal.SIGKILL)

    def _end(self, statuses: dict[Path, ProcessStatus], diagnosis: HangDiagnosis) -> None:
        guilty = [path for path, status in statuses.items() if status.rank in diagnosis.guilty]
        failure_record.write_for((guilty or list(statuses))[0].with_suffix(".json"), diagnosis.error)


def _is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
