"""What a failing process leaves behind for its launcher: one small file that says when, what and where.

It is written the moment an exception leaves the script, before anything is torn down: tearing down may block, and the
launcher should know by then. The earliest record of a run is the failure; later ones are mostly its consequences.
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

OUR_FRAMES = (os.path.join("launcher", "worker_main.py"), "<frozen runpy>", "runpy.py")
"""Between the interpreter and the script; plain python shows no such frames either."""


CONNECTION_ERRORS = (
    *("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError", "WorldError"),
    *("ConnectionError", "ConnectionResetError", "BrokenPipeError", "ConnectionRefusedError", "TimeoutError"),
)
"""The types of the exceptions that tell of a lost connection; types of torch's by name, since torch is not loaded."""


@dataclass(frozen=True)
class FailureRecord:
    """An exception that left the script."""

    time: float  # seconds since the epoch
    kind: str  # the exception's type, as in ValueError
    message: str
    traceback: str  # as python prints it, the message last; empty for a SystemExit
    exit_status: int  # what the process was going to return
    problems: tuple[Problem, ...] = ()  # what one of our own errors says, part by part

    def is_consequence(self, died: bool) -> bool:
        """Return whether this process failed because another one did. `died`: has one died by a signal? Then an error
        of a connection is a consequence too: before the loop nothing turns it into a PeerLostError."""
        broken = self.kind in CONNECTION_ERRORS and is_connection_error(self.message)
        return self.kind == "PeerLostError" or (died and broken)

    @classmethod
    def of(cls, error: BaseException) -> FailureRecord:
        """What there is to say about this exception."""
        kind = type(error).__qualname__
        if isinstance(error, SystemExit):
            status = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
            message = error.code if isinstance(error.code, str) else f"the script left with exit status {status}"
            return cls(time.time(), kind, message, "", status & 0xFF)
        told = traceback.TracebackException(type(error), error, _from_the_script(error.__traceback__))
        if isinstance(error, UnisonoError):
            told.stack = _of_the_user(told.stack)
        text = "".join(told.format())
        if isinstance(error, UnisonoError):
            return cls(time.time(), kind, str(error), text, error.exit_status, error.problems)
        return cls(time.time(), kind, str(error), text, 1)


def _from_the_script(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without our own first frames (all of it, if there is nothing else)."""
    inner = trace
    while inner is not None and inner.tb_frame.f_code.co_filename.endswith(OUR_FRAMES):
        inner = inner.tb_next
    return inner or trace


ROOM = Path(unisono.__file__).parent
RECIPES = str(ROOM / "recipes")
LIBRARIES = (str(ROOM), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))


def _of_the_user(stack: traceback.StackSummary) -> traceback.StackSummary:
    """Without our own lines and torch's: the message says what they would (all of them, if no other is left)."""
    theirs = [f for f in stack if os.path.dirname(f.filename) == RECIPES or not f.filename.startswith(LIBRARIES)]
    return traceback.StackSummary.from_list(theirs or stack)


_path: Path | None = None


def write_to(path: Path) -> None:
    """From now on this process's failure is recorded there."""
    global _path
    _path = path


def path() -> Path | None:
    """Where it would be recorded; None: nobody has started us who wants to know, or it is recorded already."""
    return _path


def write(error: BaseException) -> FailureRecord:
    """Record why this process fails; only the first call counts. Without a launcher it only returns the record."""
    global _path
    record = FailureRecord.of(error)
    if _path is not None:
        place, _path = _path, None
        _write(record, place)
    return record


def write_for(place: Path, error: UnisonoError) -> None:
    """Record for a process that cannot do it any more why it fails: it is its record if it has left none."""
    if not place.exists():
        _write(
            FailureRecord(time.time(), type(error).__qualname__, str(error), "", error.exit_status, error.problems),
            place,
        )


def _write(record: FailureRecord, place: Path) -> None:
    half = place.with_suffix(".half")  # renamed when complete, because the launcher may look at any moment
    half.write_text(json.dumps(asdict(record)), encoding="utf-8", errors="backslashreplace")
    half.rename(place)


def record_clean_end() -> None:
    """Say that the script has come to its end in peace. Its process may be there a little longer."""
    if _path is not None:
        _path.with_suffix(".left").touch()


def begin_loop(*, replaceable: bool, bequeaths: bool) -> None:
    """Say that the training loop begins here.

    replaceable  if this process dies, by a signal, the others finish its step, and another one may take its place
    bequeaths    if another one dies, this one writes down what it has, and needs a while for it
    """
    if _path is not None:
        if replaceable:
            _path.with_suffix(".replaceable").touch()
        if bequeaths:
            _path.with_suffix(".bequeaths").touch()


def is_replaceable(path: Path) -> bool:
    """Has it said that the others can go on without it?"""
    return path.with_suffix(".replaceable").exists()


def hands_off_shards(path: Path) -> bool:
    """Has it said that it will write down what it has?"""
    return path.with_suffix(".bequeaths").exists()


def mark_spare() -> None:
    """Say that the others go on without this process, should it die (should it fail, that is still the run's end)."""
    if _path is not None:
        _path.with_suffix(".spare").touch()


def is_spare(path: Path) -> bool:
    """Has the process whose failure would be recorded at this path said so?"""
    return path.with_suffix(".spare").exists()


def clean_end_at(path: Path) -> float | None:
    """When the script whose failure would be recorded at this path came to its end in peace, if it did."""
    try:
        return path.with_suffix(".left").stat().st_mtime
    except FileNotFoundError:
        return None


def read(path: Path) -> FailureRecord | None:
    """The record at this path, None if there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    content["problems"] = tuple(Problem(*problem) for problem in content["problems"])
    return FailureRecord(**content)
