"""The failure record: a small file in which a failing process reports to its launcher when, how and where it failed.

It is written at the moment at which an exception leaves the script, before any cleanup: cleaning up may block, and the
launcher needs the record by then. The earliest record of a run is its failure; later ones are mostly its consequences.
"""

from __future__ import annotations

import json
import os
import sysconfig
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

import unisono
from unisono.errors import Problem, UnisonoError, is_connection_error
from unisono.security.masking import mask_forms

OUR_FRAMES = (os.path.join("launcher", "worker_main.py"), "<frozen runpy>", "runpy.py")
"""Frames between the interpreter and the script, which plain Python does not show either."""


CONNECTION_ERRORS = (
    *("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError", "WorldError"),
    *("ConnectionError", "ConnectionResetError", "BrokenPipeError", "ConnectionRefusedError", "TimeoutError"),
)
"""Types of exceptions that a lost connection raises; by name, because torch is not loaded here."""


@dataclass(frozen=True)
class FailureRecord:
    """An exception that left the script.

    Attributes:
        time: the time in seconds since the epoch.
        kind: the name of the exception's type, such as ValueError.
        message: the message of the exception.
        traceback: the traceback as Python prints it, the message last; empty for a SystemExit.
        exit_status: the exit status of the process.
        problems: the parts of the message, for an error of Unisono's.
    """

    time: float
    kind: str
    message: str
    traceback: str
    exit_status: int
    problems: tuple[Problem, ...] = ()

    def is_consequence(self, died: bool) -> bool:
        """Return whether this process failed because another one did.

        Args:
            died: whether a process died by a signal. Then a connection error is a consequence as well: before the loop
                nothing turns it into a PeerLostError.
        """
        broken = self.kind in CONNECTION_ERRORS and is_connection_error(self.message)
        return self.kind == "PeerLostError" or (died and broken)

    @classmethod
    def of(cls, error: BaseException) -> FailureRecord:
        """Return the record of an exception."""
        kind = type(error).__qualname__
        if isinstance(error, SystemExit):
            status = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
            message = error.code if isinstance(error.code, str) else f"the script exited with status {status}"
            return cls(time.time(), kind, mask_forms(message), "", status & 0xFF)
        formatter = traceback.TracebackException(type(error), error, _from_the_script(error.__traceback__))
        if isinstance(error, UnisonoError):
            formatter.stack = _user_frames(formatter.stack)
        text = mask_forms("".join(formatter.format()))
        if isinstance(error, UnisonoError):
            return cls(time.time(), kind, str(error), text, error.exit_status, error.problems)
        return cls(time.time(), kind, mask_forms(str(error)), text, 1)


def _from_the_script(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback without our own first frames, or all of it if there are no others."""
    inner = trace
    while inner is not None and inner.tb_frame.f_code.co_filename.endswith(OUR_FRAMES):
        inner = inner.tb_next
    return inner or trace


ROOM = Path(unisono.__file__).parent
RECIPES = str(ROOM / "recipes")
LIBRARIES = (str(ROOM), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))


def _user_frames(stack: traceback.StackSummary) -> traceback.StackSummary:
    """Return the frames outside Unisono and installed libraries, or all of them if there are no others.

    The message of a UnisonoError needs no internal frames.
    """
    user = [f for f in stack if os.path.dirname(f.filename) == RECIPES or not f.filename.startswith(LIBRARIES)]
    return traceback.StackSummary.from_list(user or stack)


_path: Path | None = None


def write_to(path: Path) -> None:
    """Record the failure of this process in this file."""
    global _path
    _path = path


def path() -> Path | None:
    """Return the path of this process's record; None if no launcher reads it, or if it is written already."""
    return _path


def write(error: BaseException) -> FailureRecord:
    """Record the failure of this process, once and only under a launcher. Return the record."""
    global _path
    record = FailureRecord.of(error)
    if _path is not None:
        path, _path = _path, None
        _write(record, path)
    return record


def write_for(path: Path, error: UnisonoError) -> None:
    """Record a failure for another process, which cannot record it itself, unless it has a record."""
    if not path.exists():
        _write(
            FailureRecord(time.time(), type(error).__qualname__, str(error), "", error.exit_status, error.problems),
            path,
        )


def _write(record: FailureRecord, path: Path) -> None:
    partial = path.with_suffix(".partial")  # renamed when complete, because the launcher may read at any moment
    partial.write_text(json.dumps(asdict(record)), encoding="utf-8", errors="backslashreplace")
    partial.rename(path)


# Files beside the record give the launcher more information about a process. They are empty.


def record_clean_end() -> None:
    """Record that the script has ended without an error. Its process may run a little longer."""
    if _path is not None:
        _path.with_suffix(".ended").touch()


def begin_loop(*, replaceable: bool, hands_off: bool) -> None:
    """Record that the training loop begins.

    Args:
        replaceable: whether the others can finish this process's step if it dies by a signal, and a replacement may
            join.
        hands_off: whether this process writes its shards to disk when another one dies, which takes a while.
    """
    if _path is not None:
        if replaceable:
            _path.with_suffix(".replaceable").touch()
        if hands_off:
            _path.with_suffix(".hands-off").touch()


def is_replaceable(path: Path) -> bool:
    """Return whether the others can continue without the process whose record is at `path`."""
    return path.with_suffix(".replaceable").exists()


def hands_off_shards(path: Path) -> bool:
    """Return whether the process whose record is at `path` writes its shards to disk when another one dies."""
    return path.with_suffix(".hands-off").exists()


def mark_spare() -> None:
    """Record that the others continue without this process if it dies. If it fails, the run fails nevertheless."""
    if _path is not None:
        _path.with_suffix(".spare").touch()


def is_spare(path: Path) -> bool:
    """Return whether the process whose record is at `path` has called `mark_spare`."""
    return path.with_suffix(".spare").exists()


def clean_end_at(path: Path) -> float | None:
    """Return when the script of the process whose record is at `path` ended without an error, or None if it did not."""
    try:
        return path.with_suffix(".ended").stat().st_mtime
    except FileNotFoundError:
        return None


def read(path: Path) -> FailureRecord | None:
    """Return the record at this path, or None if there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    content["problems"] = tuple(Problem(*problem) for problem in content["problems"])
    return FailureRecord(**content)
