"""unisono fingerprint: which weights are these?"""

from __future__ import annotations

import json as json_
import shlex
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from unisono.checkpoint import manifest
from unisono.cli.request.run_dir import RUNS
from unisono.errors import SettingsError


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
        A run directory (its newest complete checkpoint is taken), or one checkpoint.
    state
        Also that of optimizers and schedules.
    json
        Print it as JSON.
    """
    itself = any((folder / name).is_file() for name in ("state.json", "manifest.json"))
    if not itself and not manifest.any_of(folder):
        true = "There is no checkpoint in it." if folder.is_dir() else "There is no such folder."
        raise SettingsError(
            f"unisono fingerprint {folder}", true, f"unisono fingerprint {shlex.quote(with_checkpoints(folder))}"
        )
    from unisono.checkpoint import load  # it loads torch, and that only now

    found = load.fingerprint(folder, state)
    if json:
        print(json_.dumps({key: str(value) if isinstance(value, Path) else value for key, value in found.items()}))
    else:
        for name, value in found.items():
            print(f"{name:14} {value}")
    return 0


def with_checkpoints(folder: Path) -> str:
    """A run directory that was probably meant: in this folder, below runs/, or an example."""
    there = [path for parent in (folder, folder / RUNS, RUNS) for path in parent.glob("*") if manifest.any_of(path)]
    newest = max(there, key=lambda path: path.stat().st_mtime, default=None)
    return str(newest) if newest is not None else "runs/NAME-TIME"
