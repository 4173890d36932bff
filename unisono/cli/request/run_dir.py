"""Where a run keeps what it leaves: which folder, and may it be used?"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shlex
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TextIO

from unisono.checkpoint import manifest
from unisono.config import CommandLine
from unisono.errors import Problem, SettingsError

RUNS = Path("runs")
"""Under the folder one is in."""
FOLDERS = ("log", "timeline", "checkpoints")
FILES = ("settings.toml", "environment.json", "result.json")
"""What a run leaves in its directory."""
APART = "checkpoint.dir=none"
"""Set where a script is tried, or a run's is run again: what these save is not to lie among a run's own checkpoints,
where keeping a few of them would remove others."""
LOCK = ".lock"
"""Whoever writes to the directory has a lock on this file; it says who that is."""


def choose_run_dir(stem: str, asked: Path | None, *, resume: bool, line: CommandLine) -> Path:
    """The run directory, there and writable. Raises SettingsError.

    stem   what is run, as in `text`
    asked  what --run-dir says; None: runs/<stem>-<time>, or with `resume` the newest of these
    line   what was typed, for the messages
    """
    problems = problems_of_run_dir(stem, asked, resume=resume, line=line)
    if problems:
        raise SettingsError.of(problems)
    if asked is None and resume:
        asked = newest_run(stem)
        assert asked is not None  # or it had been a problem
    try:
        if asked is not None:
            asked.mkdir(parents=True, exist_ok=True)
            return asked
        return _new_folder(stem)
    except OSError as error:
        path = asked or RUNS
        raise SettingsError.of([not_writable(path, error.strerror or str(error), line)]) from None


def problems_of_run_dir(stem: str, asked: Path | None, *, resume: bool, line: CommandLine) -> list[Problem]:
    """What is wrong with this choice; looks, and makes nothing."""
    path = newest_run(stem) if asked is None and resume else asked
    if path is None and resume:
        do = _from_the_start(line)
        return [Problem("--resume", f"There is no run {stem}-* in {RUNS.resolve()}.", do)]
    if path is None:
        return _problems_of_writing(RUNS, line)
    if path.exists() and not path.is_dir():
        return [Problem(f"--run-dir {path}", "It is a file.", str(line.flag("--run-dir", f"{path}-run")))]
    if resume and not path.exists():
        do = _from_the_start(line)
        return [Problem(f"--resume --run-dir {path}", "There is no such folder.", do)]
    held = "" if resume else _held_by(path)
    if held:
        do = f"{line.flag('--resume')}, or: {line.flag('--run-dir', f'{path}-2')}"
        return [Problem(f"--run-dir {path}", f"It holds a run already: {held}.", do)]
    busy = _holder(path)
    if busy is not None:
        return [_busy(path, busy, line)]
    return _problems_of_kind(path, line) or _problems_of_writing(path, line)


def _from_the_start(line: CommandLine) -> str:
    anew = line.without("--resume").without("--accept-change")
    return f"{anew} (from the start), or: {line.flag('--run-dir', 'DIR')}"


def newest_run(stem: str) -> Path | None:
    """The newest runs/<stem>-<time> with a checkpoint; if none has one, the newest of all (by name)."""
    pattern = re.compile(rf"{re.escape(stem)}-(\d{{8}}-\d{{6}})(?:-(\d+))?")
    found = []
    for path in RUNS.glob("*"):
        match = pattern.fullmatch(path.name)
        if match and path.is_dir():
            found.append((manifest.any_of(path), match[1], int(match[2] or 0), path))
    return max(found)[-1] if found else None


def _held_by(path: Path) -> str:
    """What a folder has of an earlier run, in words; "" where it has nothing."""
    checkpoints = sorted(path.glob("checkpoints/step-*"))
    held = []
    if checkpoints:
        count = len(checkpoints)
        held.append(f"{count} checkpoint{'s' if count > 1 else ''}, the newest {checkpoints[-1].name}")
    held += [f"checkpoints in {where}" for where in manifest.storage_history(path) if where is not None]
    if (path / "result.json").exists():
        held.append("a result.json")
    return " and ".join(held)


def _problems_of_kind(path: Path, line: CommandLine) -> list[Problem]:
    """A file where a run keeps a folder, or the other way round."""
    problems = []
    for name in (*FOLDERS, *FILES):
        there = path / name
        if there.exists() and there.is_dir() != (name in FOLDERS):
            is_, should = ("file", "folder") if name in FOLDERS else ("folder", "file")
            true = f"{there} is a {is_}, and a run keeps a {should} there."
            do = f"{shlex.join(['mv', str(there), f'{there}-before'])} && {line}"
            problems.append(Problem(f"Keep the run in {path}", true, do))
    return problems


def _problems_of_writing(path: Path, line: CommandLine) -> list[Problem]:
    """Can it be written to, or made?"""
    there = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    if not there.is_dir():
        return [not_writable(path, f"{there} is not a folder", line)]
    inner = FOLDERS if there == path.absolute() else ()  # what lies beside it may be called as it likes
    for folder in (there, *(there / name for name in inner)):
        if folder.exists() and not os.access(folder, os.W_OK | os.X_OK):
            reason = os.strerror(errno.EROFS if _is_read_only(folder) else errno.EACCES)
            return [not_writable(path, f"{reason} in {folder}", line)]
    return []


def _is_read_only(folder: Path) -> bool:
    """Does it lie on a file system that nobody may write to?"""
    return bool(os.statvfs(folder).f_flag & os.ST_RDONLY)


def not_writable(path: Path, reason: str, line: CommandLine) -> Problem:
    """The run cannot be kept there."""
    do = f"{line.flag('--run-dir', 'DIR')}, with a folder that you may write to."
    return Problem(f"Keep the run in {path}", f"It cannot be written: {reason}.", do)


LOOK_SECONDS = 0.05
"""Between two tries to lock a directory that another process lets go of."""


@contextmanager
def lock_run_dir(path: Path, line: CommandLine, *, patience: float = 0.0) -> Iterator[None]:
    """A block in which this run directory is ours. Raises SettingsError where another process has it, and keeps it for
    so many seconds.

    The kernel lets go of the lock when we die, however we die: the file that stays is no obstacle.
    """
    until = time.monotonic() + patience
    try:
        file = open(path / LOCK, "a+", encoding="utf-8")  # noqa: SIM115  (closed below)
    except OSError:  # no locks on this file system: training matters more
        yield
        return
    with file:
        try:
            while not _locked(file):
                if time.monotonic() >= until:
                    raise SettingsError.of([_busy(path, _who(file), line)])
                time.sleep(LOOK_SECONDS)
        except OSError:
            yield
            return
        file.truncate(0)
        with suppress(OSError):  # a full disk; the lock holds without a name, and what needs the room will say so
            os.write(file.fileno(), f"{os.getpid()} {socket.gethostname()}\n".encode())
        _ours.append(file)
        try:
            yield
        finally:
            _ours.remove(file)


_ours: list[TextIO] = []


def _locked(file: TextIO) -> bool:
    """Is it ours now?"""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _let_go() -> None:
    """A lock belongs to everybody who has the file open. Workers that outlive us for a moment should not keep it."""
    for file in _ours:
        file.close()


os.register_at_fork(after_in_child=_let_go)


class LockHolder(NamedTuple):
    """Who has a run directory."""

    pid: str
    host: str


def _holder(path: Path) -> LockHolder | None:
    """Who has it at this moment; None: nobody, or nobody knows."""
    try:
        with open(path / LOCK, encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return _who(file)
    except OSError:
        pass
    return None


def _who(file: TextIO) -> LockHolder:
    file.seek(0)
    pid, _, host = file.read().strip().partition(" ")
    return LockHolder(pid or "?", host or "?")


def _busy(path: Path, holder: LockHolder, line: CommandLine) -> Problem:
    true = f"Process {holder.pid} on {holder.host} is at work in it."
    kill = f"kill {holder.pid}" if holder.host == socket.gethostname() else f"ssh {holder.host} kill {holder.pid}"
    again = line if "--resume" in line.words else line.flag("--run-dir", f"{path}-2")
    do = f"{again} (once that one is over; to end it, which saves: {kill})"
    if again is not line:
        do = f"{again}, beside it; or, to end that one, which saves: {kill}"
    return Problem(f"--run-dir {path}", true, do)


def _new_folder(stem: str) -> Path:
    """A folder that was not there before; two runs of one second get different ones."""
    RUNS.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    number = 1
    while True:
        path = RUNS / (f"{stem}-{stamp}" if number == 1 else f"{stem}-{stamp}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
        else:
            return path


def discard_run_dir(path: Path) -> None:
    """Remove a run directory in which nothing was computed, and `runs` if it is empty then."""
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):  # it has other runs
        RUNS.rmdir()


def write(path: Path, text: str) -> None:
    """Write a small file whole or not at all."""
    draft = path.with_name(f".{path.name}.{time.time_ns()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError:
        with suppress(OSError):
            draft.unlink()
        raise
