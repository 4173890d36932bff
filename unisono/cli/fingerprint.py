"""unisono fingerprint: which weights are these?"""

from __future__ import annotations

import json as json_
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

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
    if not folder.is_dir():
        do = "unisono fingerprint runs/NAME-TIME"
        raise SettingsError(f"unisono fingerprint {folder}", "There is no such folder.", do)
    from unisono.checkpoint import load  # it loads torch, and that only now

    found = load.fingerprint(folder, state)
    if json:
        print(json_.dumps({key: str(value) if isinstance(value, Path) else value for key, value in found.items()}))
    else:
        for name, value in found.items():
            print(f"{name:14} {value}")
    return 0
