"""The launcher's lookout: a thread that reads, once a second, where its processes stand, and acts when they are stuck.

It has no part in the processes' group and needs nothing of them: one that is stopped, or whose interpreter is held, is
seen as well. To end a run it writes the record of who is to blame, which the supervisor (supervisor.py) then finds as
if that process had written it: the others are told to end, and the table is the last thing on the screen.
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
from unisono.launcher.status_file import ProcessStatus, line_of_silent, now, read, seconds_of, stacks_path, state_of

LOOK_SECONDS = 0.5


class HangWatcher:
    """A block in which the processes whose records would be in `folder` are watched.

    say  tell on standard error of a run that is stuck and goes on all the same
    """

    def __init__(self, folder: Path, *, say: bool = True) -> None:
        self.folder, self.say = folder, say
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lookout", daemon=True)
        self._telling = ReportBackoff()
        self._used: dict[int, tuple[float, float]] = {}  # of silent ones, by pid: when we looked first, and the seconds

    def __enter__(self) -> HangWatcher:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            found = dict(self._places())
            verdict = judge(list(found.values())) if found else None
            if verdict is None:
                self._telling.reset()
                continue
            if any(place.silent for place in found.values()):
                verdict = judge(list(self._asked(found))) or verdict
            if verdict.then == "end" or (verdict.then == "kill" and not verdict.guilty):
                self._end(found, verdict)
                return
            if self._telling.is_due(min(place.idle for place in found.values())) and self.say:
                with contextlib.suppress(OSError, ValueError):
                    print(f"\n{verdict.error}", file=sys.stderr, flush=True)
            if verdict.then == "kill":
                self._kill([place for place in found.values() if place.rank in verdict.guilty])

    def _places(self) -> Iterator[tuple[Path, ProcessStatus]]:
        """Of every process that is there and has not failed or left; who says nothing stands where he last stood."""
        for path in sorted(self.folder.glob("rank-*.place")):
            told = path.with_suffix(".json")
            place = read(path)
            if place is None or told.exists() or failure_record.clean_end_at(told) is not None or not _lives(place.pid):
                continue
            silence = now() - place.written
            if silence > place.patience:
                began, seconds = self._used.setdefault(place.pid, (time.monotonic(), seconds_of(place.pid)))
                span = time.monotonic() - began
                share = (seconds_of(place.pid) - seconds) / span if span > LOOK_SECONDS / 2 else None
                place = replace(place, idle=place.idle + silence, silent=state_of(place.pid), waits="", share=share)
            else:
                self._used.pop(place.pid, None)
            yield path, place

    def _asked(self, found: dict[Path, ProcessStatus]) -> Iterator[ProcessStatus]:
        """The same, with the line where a silent one is, if it can still be had."""
        for path, place in found.items():
            if not place.silent:
                yield place
                continue
            line = line_of_silent(place.pid, stacks_path(path), place.thread)
            yield replace(place, where=line or place.where, code="" if line else place.code)

    def _kill(self, guilty: Sequence[ProcessStatus]) -> None:
        """With all that they have started, as the supervisor would: it then sees a death as any other."""
        for place in guilty:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(place.pid, signal.SIGKILL)

    def _end(self, found: dict[Path, ProcessStatus], verdict: HangDiagnosis) -> None:
        guilty = [path for path, place in found.items() if place.rank in verdict.guilty]
        failure_record.write_for((guilty or list(found))[0].with_suffix(".json"), verdict.error)


def _lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
