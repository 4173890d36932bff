"""The variables of this process: the only module that reads or sets them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from unisono.security.masking import remember


def variables(names: Iterable[str]) -> dict[str, str]:
    """Return those of the named environment variables that are set."""
    return {name: os.environ[name] for name in names if name in os.environ}


def cache() -> Path:
    """Return the cache folder: $XDG_CACHE_HOME/unisono, or ~/.cache/unisono."""
    given = os.environ.get("XDG_CACHE_HOME")
    return (Path(given) if given else Path.home() / ".cache") / "unisono"


def cache_folder() -> Path:
    """Return the folder for what a script downloads or makes once: $XDG_CACHE_HOME/unisono, or ~/.cache/unisono.

    The folder may not exist yet. Fill it inside of `run.first()`.
    """
    return cache()


def remember_secrets() -> None:
    """Mask the values of variables such as WANDB_API_KEY in every file and message of this process."""
    remember(os.environ)


def set_for_libraries(name: str, value: str) -> None:
    """Set a variable that a library of this process will read, unless the user has set it."""
    os.environ.setdefault(name, value)


def inherited(changes: dict[str, str]) -> dict[str, str]:
    """Return the environment for a process that Unisono starts: this one's, with changes for its libraries."""
    return {**os.environ, **changes}
