"""Open the run directories that a command line names, or say what to type instead."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.cli.request.run_dir import RUNS
from unisono.errors import Problem, SettingsError

if TYPE_CHECKING:
    from unisono.report.run_files import RunFiles


def open_runs(paths: Sequence[Path], *command: str) -> list[RunFiles]:
    """Open and read run directories.

    Args:
        paths: The run directories.
        command: The command before them, for messages.

    Raises:
        SettingsError: None is named, or one is no run directory.
    """
    from unisono.report.run_files import RunFiles, is_run, no_run  # here, because it loads numpy

    if not paths:
        known = sorted((path for path in RUNS.glob("*") if is_run(path)), key=lambda path: path.stat().st_mtime)
        facts = f"The newest run in {RUNS}/ is {known[-1].name}." if known else f"There is no run in {RUNS.resolve()}."
        run = str(known[-1]) if known else "RUN"
        raise SettingsError("No run is named.", facts, shlex.join([*command, run]))
    problems = [_with_command(no_run(path), command) for path in paths if not is_run(path)]
    if problems:
        raise SettingsError.of(problems)
    opened = [RunFiles(path) for path in paths]
    for files in opened:
        files.read()
    return opened


def _with_command(problem: Problem, command: Sequence[str]) -> Problem:
    """Return the problem with a command to type, where its remedy is a run."""
    if Path(problem.remedy).is_dir():
        return problem._replace(remedy=shlex.join([*command, problem.remedy]))
    return problem
