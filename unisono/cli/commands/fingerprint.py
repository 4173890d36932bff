"""unisono fingerprint: print the sha256 of a run's weights."""

from __future__ import annotations

import json as json_
import shlex
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from unisono.checkpoint import manifest
from unisono.cli.request.run_dir import RUNS
from unisono.errors import SettingsError
from unisono.monitor.stream_text import to_stderr


def fingerprint(
    folder: Path,
    /,
    *,
    state: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    json: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
) -> int:
    """Print the sha256 of a run's weights, the same for any number of processes.

    Parameters
    ----------
    folder
        A run directory, for its newest complete checkpoint, or a checkpoint.
    state
        Also print the sha256 of optimizers and schedules.
    json
        Print them as JSON.
    """
    if error := no_checkpoint(folder):
        do = f"unisono fingerprint {shlex.quote(with_checkpoints(folder))}"
        raise SettingsError(error, "The argument is a run directory, or a checkpoint.", do)
    from unisono.checkpoint import load  # here, because it loads torch

    found = load.fingerprint(folder, state, to_stderr)
    if json:
        print(json_.dumps({key: str(value) if isinstance(value, Path) else value for key, value in found.items()}))
    else:
        for name, value in found.items():
            print(f"{name:14} {value}")
    return 0


def no_checkpoint(folder: Path) -> str:
    """Return the error if a folder is neither a checkpoint nor a run directory with one; "" if it is."""
    if any((folder / name).is_file() for name in ("state.json", "manifest.json")) or manifest.any_of(folder):
        return ""
    return f"There is no checkpoint in {folder}." if folder.is_dir() else f"There is no folder {folder}."


def with_checkpoints(folder: Path) -> str:
    """Return the newest run directory in this folder or in runs/; an example if there is none."""
    there = [path for parent in (folder, folder / RUNS, RUNS) for path in parent.glob("*") if manifest.any_of(path)]
    newest = max(there, key=lambda path: path.stat().st_mtime, default=None)
    return str(newest) if newest is not None else "runs/NAME-TIME"
