"""The run directory: choose it, check that it can be used, and lock it."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shlex
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from unisono.checkpoint import manifest
from unisono.checkpoint.contents import STATE
from unisono.config import CommandLine
from unisono.errors import Problem, SettingsError
from unisono.json_forms import is_text, parse
from unisono.security.audit_trail import leave_reason
from unisono.security.file_modes import CLOSED, make_closed, open_like_folder, write_text
from unisono.security.masking import MASK

RUNS = Path("runs")
"""The folder for run directories, in the working directory."""
FOLDERS = ("log", "timeline", "checkpoints")
FILES = ("settings.toml", "environment.json", "result.json")
"""Folders and files in a run directory."""
FURTHER = (
    *("profile", "media", "left-behind", "tensorboard", "mlflow", "wandb", "launch", "faults", "values"),
    *("audit.jsonl", "report.html", "metrics.csv", "tracking.json", "tracking.lock", "flops.json"),
)
"""Further ones, which only some runs have."""
CHECKPOINTS_IN_RUN_DIR = "checkpoint.dir=none"
"""A setting for trials and repeated runs. Otherwise they would save among the checkpoints of the script's own runs, and
`checkpoint.keep` would remove those."""
ARGUMENTS = "script arguments"
"""The field of a run's identity with the script's own arguments, secrets masked."""
LOCK = ".lock"
"""The process that writes to the directory holds a lock on this file, which contains its process id and host."""


def choose_run_dir(stem: str, run_dir: Path | None, *, resume: bool, line: CommandLine) -> Path:
    """Return the run directory, and create it if necessary.

    Args:
        stem: the name of the recipe or script, as in `text`.
        run_dir: the value of --run-dir; None for runs/<stem>-<time>, or with `resume` for the newest of these.
        resume: whether a run is resumed.
        line: the typed command, for messages.

    Raises:
        SettingsError: if the directory cannot be used.
    """
    problems = problems_of_run_dir(stem, run_dir, resume=resume, line=line)
    if problems:
        raise SettingsError.of(problems)
    if run_dir is None and resume:
        run_dir = newest_run(stem)
        assert run_dir is not None  # otherwise there was a problem
    try:
        if run_dir is not None:
            make_closed(run_dir)
            return run_dir
        return _new_folder(stem)
    except OSError as error:
        path = run_dir or RUNS
        raise SettingsError.of([not_writable(path, error.strerror or str(error), line)]) from None


def problems_of_run_dir(stem: str, run_dir: Path | None, *, resume: bool, line: CommandLine) -> list[Problem]:
    """Return what is wrong with a run directory, without creating anything; see `choose_run_dir`."""
    path = newest_run(stem) if run_dir is None and resume else run_dir
    if path is None and resume:
        facts = f"There is no run {stem}-* in {RUNS.resolve()}."
        return [Problem("Nothing to resume.", facts, _from_the_start(line))]
    if path is None:
        return _problems_of_writing(RUNS, line)
    if path.exists() and not path.is_dir():
        do = str(line.flag("--run-dir", f"{path}-run"))
        return [Problem(f"{path} is a file.", "--run-dir takes a folder.", do)]
    if resume and not path.exists():
        return [Problem("Nothing to resume.", f"There is no folder {path}.", _from_the_start(line))]
    content = "" if resume else _run_in(path)
    if content:
        error, another = f"{path} already contains a run.", line.flag("--run-dir", str(free_name(path)))
        if (script := script_in(path)) and script.stem != stem:
            return [Problem(error, f"It is a run of {script.name}, and has {content}.", str(another))]
        return [Problem(error, f"It has {content}.", f"{line.flag('--resume')}, or: {another}")]
    busy = _holder(path)
    if busy is not None:
        return [_busy(path, busy, line)]
    return _problems_of_kind(path, line) or _problems_of_writing(path, line)


def free_name(path: Path) -> Path:
    """Return a path beside a run directory that does not exist: DIR-2, DIR-3, and so on."""
    return next(free for number in count(2) if not (free := path.with_name(f"{path.name}-{number}")).exists())


def _from_the_start(line: CommandLine) -> str:
    start = line.without("--resume").without("--accept-change")
    return f"{start} (from the start), or: {line.flag('--run-dir', 'DIR')}"


def newest_run(stem: str) -> Path | None:
    """Return the newest runs/<stem>-<time> with a checkpoint; if none has one, the newest of all, by name."""
    pattern = re.compile(rf"{re.escape(stem)}-(\d{{8}}-\d{{6}})(?:-(\d+))?")
    found = []
    for path in RUNS.glob("*"):
        match = pattern.fullmatch(path.name)
        if match and path.is_dir():
            found.append((manifest.any_of(path), match[1], int(match[2] or 0), path))
    return max(found)[-1] if found else None


def _run_in(path: Path) -> str:
    """Return what a folder contains of an earlier run; "" if nothing."""
    checkpoints = sorted(path.glob("checkpoints/step-*"))
    found = []
    if checkpoints:
        number = len(checkpoints)
        found.append(f"{number} checkpoint{'s' if number > 1 else ''}, the newest {checkpoints[-1].name}")
    found += [f"checkpoints in {where}" for where in manifest.storage_history(path) if where is not None]
    if (path / "result.json").exists():
        found.append("a result.json")
    return " and ".join(found)


def run_in(path: Path) -> str | None:
    """Return the id of the run in a run directory; None if there is none, or its environment.json cannot be read."""
    run = _recorded(path, "run")
    return run if is_text(run) else None


def script_in(path: Path) -> Path | None:
    """Return the absolute path of the script of a run; None if its environment.json cannot be read."""
    script = _recorded(path, "script")
    return Path(script) if script and is_text(script) else None


def arguments_in(path: Path) -> tuple[str, ...]:
    """Return the arguments of the script of a run, secrets masked; () if they are unknown.

    They are those of the newest checkpoint. If none is on a disk of this host, they are those of the newest start, at
    which the script may have refused them.
    """
    found = _recorded(path, "arguments")
    for _, checkpoint in manifest.checkpoints(path)[:1]:
        with suppress(OSError):
            identity = (parse((checkpoint / STATE).read_bytes()) or {}).get("identity")
            found = identity.get(ARGUMENTS, found) if isinstance(identity, dict) else found
    return tuple(found) if isinstance(found, list) and all(map(is_text, found)) else ()


def arguments_not_stored(path: Path, do: str) -> SettingsError:
    """Return the error for a run whose script had a secret among its arguments."""
    facts = f"They contain a secret, so environment.json has {MASK} in its place."
    return SettingsError(f"The arguments of the script of {path} are not stored.", facts, do)


def _recorded(path: Path, name: str) -> Any:
    """Return an entry of environment.json; None if there is none."""
    try:
        return (parse((path / "environment.json").read_bytes()) or {}).get(name)
    except OSError:
        return None


def _problems_of_kind(path: Path, line: CommandLine) -> list[Problem]:
    """Return a problem for a file in place of a folder of the run, and for a folder in place of a file."""
    problems = []
    for name in (*FOLDERS, *FILES):
        there = path / name
        if there.exists() and there.is_dir() != (name in FOLDERS):
            is_, should = ("file", "folder") if name in FOLDERS else ("folder", "file")
            facts = f"{there} is a {is_}; the run needs a {should} there."
            do = f"{shlex.join(['mv', str(there), f'{there}-before'])} && {line}"
            problems.append(Problem(f"Cannot use {path} as run directory.", facts, do))
    return problems


def _problems_of_writing(path: Path, line: CommandLine) -> list[Problem]:
    """Return a problem if the folder can neither be written to nor created."""
    there = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    if not there.is_dir():
        return [not_writable(path, f"{there} is not a folder", line)]
    inner = FOLDERS if there == path.absolute() else ()  # other files in its parent do not matter
    for folder in (there, *(there / name for name in inner)):
        if folder.exists() and not os.access(folder, os.W_OK | os.X_OK):
            reason = os.strerror(errno.EROFS if _is_read_only(folder) else errno.EACCES)
            return [not_writable(path, f"{reason} in {folder}", line)]
    return []


def _is_read_only(folder: Path) -> bool:
    """Return whether a folder is on a read-only file system."""
    return bool(os.statvfs(folder).f_flag & os.ST_RDONLY)


def not_writable(path: Path, reason: str, line: CommandLine) -> Problem:
    """Return the problem with a run directory that cannot be written."""
    do = f"{line.flag('--run-dir', 'DIR')}, with a writable folder"
    return Problem(f"Cannot write the run directory {path}.", f"{reason}.", do)


RETRY_SECONDS = 0.05
"""Seconds between two attempts to lock a directory that another process is about to release."""


@contextmanager
def lock_run_dir(path: Path, line: CommandLine, *, patience: float = 0.0) -> Iterator[None]:
    """Hold the lock of a run directory during a block.

    The kernel releases the lock when the process dies, so a lock file that remains is no obstacle.

    Args:
        path: the run directory.
        line: the typed command, for messages.
        patience: seconds to wait for another process to release the lock.

    Raises:
        SettingsError: if another process holds the lock for longer.
    """
    until = time.monotonic() + patience
    try:
        file = open(path / LOCK, "a+", encoding="utf-8", opener=open_like_folder)  # noqa: SIM115  (closed below)
    except OSError:  # the file system has no locks; train anyway
        yield
        return
    with file:
        try:
            while not _locked(file):
                if time.monotonic() >= until:
                    raise SettingsError.of([_busy(path, _holder_in(file), line)])
                time.sleep(RETRY_SECONDS)
        except OSError:
            yield
            return
        file.truncate(0)
        with suppress(OSError):  # a full disk: the lock works without its content, and later writes report the disk
            os.write(file.fileno(), f"{os.getpid()} {socket.gethostname()}\n".encode())
        _ours.append(file)
        try:
            yield
        finally:
            _ours.remove(file)


_ours: list[TextIO] = []


def _locked(file: TextIO) -> bool:
    """Try to lock a file, and return whether that worked."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _release_in_child() -> None:
    """Close lock files after a fork. A lock lasts until every process that inherited the file has closed it, and loader
    workers may outlive this process for a moment."""
    for file in _ours:
        file.close()


os.register_at_fork(after_in_child=_release_in_child)


class LockHolder(NamedTuple):
    """The process that holds the lock of a run directory."""

    pid: str
    host: str


def is_in_use(path: Path) -> bool:
    """Return whether a process of this or another host writes to a run directory."""
    return _holder(path) is not None


def _holder(path: Path) -> LockHolder | None:
    """Return the process that holds the lock; None if there is none, or if that is not known."""
    try:
        with open(path / LOCK, encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return _holder_in(file)
    except OSError:
        pass
    return None


def _holder_in(file: TextIO) -> LockHolder:
    file.seek(0)
    pid, _, host = file.read().strip().partition(" ")
    return LockHolder(pid or "?", host or "?")


def stop_run(path: Path, **reason: str) -> str:
    """Make the process that writes to a run directory save and end. Return why that is not possible; "" if it worked.

    Args:
        path: the run directory.
        reason: what the process records about it.
    """
    holder = _holder(path)
    if holder is None:
        return "No process is writing to this run."
    if holder.host != socket.gethostname():
        return f"Process {holder.pid} writes to this run, on another host. Next: ssh {holder.host} kill {holder.pid}"
    if not _has_open(holder.pid, path / LOCK):
        return f"Process {holder.pid} writes to this run, and cannot be found from here."
    try:
        leave_reason(path, **reason)
        os.kill(int(holder.pid), signal.SIGTERM)
    except OSError as error:
        return f"Process {holder.pid} writes to this run, and cannot be stopped: {error.strerror}."
    return ""


def _has_open(pid: str, file: Path) -> bool:
    """Return whether a process has a file open, where the system shows that: in another container, the number is that
    of another process."""
    if not pid.isdecimal():
        return False
    try:
        lock, files = file.stat(), list(Path("/proc", pid, "fd").iterdir())
    except OSError:
        return not Path("/proc/self/fd").is_dir()
    for each in files:
        with suppress(OSError):  # closed meanwhile
            if os.path.samestat(each.stat(), lock):
                return True
    return False


def _busy(path: Path, holder: LockHolder, line: CommandLine) -> Problem:
    facts = f"Process {holder.pid} on {holder.host} is writing to it."
    kill = f"kill {holder.pid}" if holder.host == socket.gethostname() else f"ssh {holder.host} kill {holder.pid}"
    again = line if "--resume" in line.words else line.flag("--run-dir", str(free_name(path)))
    do = f"{again} (after that process has ended; to make it save and end: {kill})"
    if again is not line:
        do = f"{again}, or, to make that process save and end: {kill}"
    return Problem(f"{path} is in use.", facts, do)


def _new_folder(stem: str) -> Path:
    """Create a new folder. Two runs that start in the same second get different ones."""
    RUNS.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    number = 1
    while True:
        path = RUNS / (f"{stem}-{stamp}" if number == 1 else f"{stem}-{stamp}-{number}")
        try:
            path.mkdir(mode=CLOSED)
        except FileExistsError:
            number += 1
        else:
            return path


def is_ours(name: str) -> bool:
    """Return whether a name in a run directory, or in a folder of checkpoints, is one that runs write."""
    return name in (*FOLDERS, *FILES, *FURTHER) or name.startswith((".", "step-"))


def discard_run_dir(path: Path) -> None:
    """Remove a run directory in which nothing was computed, and `runs` if it is empty then."""
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):  # it has other runs
        RUNS.rmdir()


def write(path: Path, text: str) -> None:
    """Write a small file completely or not at all."""
    draft = path.with_name(f".{path.name}.{time.time_ns()}")
    try:
        write_text(draft, text)
        draft.replace(path)
    except OSError:
        with suppress(OSError):
            draft.unlink()
        raise
