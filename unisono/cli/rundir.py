"""Where a run keeps what it leaves: which folder, and may it be used?"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from unisono.errors import Problem, SettingsError

RUNS = Path("runs")
"""Under the folder one is in."""


def choose_run_dir(stem: str, asked: Path | None, *, resume: bool, command: str) -> Path:
    """The run directory, there and writable. Raises SettingsError.

    stem     what is run, as in `text`
    asked    what --run-dir says; None: runs/<stem>-<time>, or with `resume` the newest of these
    command  how to start it again, for the messages: "unisono run text", or "python train.py"
    """
    problems = problems_of_run_dir(stem, asked, resume=resume, command=command)
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
        raise SettingsError.of([_not_writable(path, error.strerror or str(error), command)]) from None


def problems_of_run_dir(stem: str, asked: Path | None, *, resume: bool, command: str) -> list[Problem]:
    """What is wrong with this choice; looks, and makes nothing."""
    if asked is None:
        if resume and newest_run(stem) is None:
            here = RUNS.resolve()
            do = f"{command} (from the start), or {command} --resume --run-dir DIR"
            return [Problem("--resume", f"There is no run {stem}-* in {here}.", do)]
        return _problems_of_writing(RUNS, command)
    if asked.exists() and not asked.is_dir():
        return [Problem(f"--run-dir {asked}", "It is a file.", f"{command} --run-dir {asked}-run")]
    if resume:
        if not asked.exists():
            do = f"Check the path, or start it: {command} --run-dir {asked}"
            return [Problem(f"--resume --run-dir {asked}", "There is no such folder.", do)]
    else:
        held = _held_by(asked)
        if held:
            do = f"{command} --run-dir {asked} --resume, or choose another --run-dir."
            return [Problem(f"--run-dir {asked}", f"It holds a run already: {held}.", do)]
    return _problems_of_writing(asked, command)


def newest_run(stem: str) -> Path | None:
    """The newest runs/<stem>-<time> with a checkpoint; if none has one, the newest of all (by name)."""
    pattern = re.compile(rf"{re.escape(stem)}-(\d{{8}}-\d{{6}})(?:-(\d+))?")
    found = []
    for path in RUNS.glob("*"):
        match = pattern.fullmatch(path.name)
        if match and path.is_dir():
            found.append((any(path.glob("checkpoints/step-*")), match[1], int(match[2] or 0), path))
    return max(found)[-1] if found else None


def _held_by(path: Path) -> str:
    """What a folder has of an earlier run, in words; "" where it has nothing."""
    checkpoints = sorted(path.glob("checkpoints/step-*"))
    held = []
    if checkpoints:
        count = len(checkpoints)
        held.append(f"{count} checkpoint{'s' if count > 1 else ''}, the newest {checkpoints[-1].name}")
    if (path / "result.json").exists():
        held.append("a result.json")
    return " and ".join(held)


def _problems_of_writing(path: Path, command: str) -> list[Problem]:
    """Can it be written to, or made?"""
    there = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    if not there.is_dir():
        return [_not_writable(path, f"{there} is not a folder", command)]
    if not os.access(there, os.W_OK | os.X_OK):
        return [_not_writable(path, f"Permission denied in {there}", command)]
    return []


def _not_writable(path: Path, reason: str, command: str) -> Problem:
    do = f"{command} --run-dir DIR, with a folder that you may write to."
    return Problem(f"Keep the run in {path}", f"It cannot be written: {reason}.", do)


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
