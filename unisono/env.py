"""Where this process stands among the processes of its run, as a plain value. The one reader of the environment.

Our own launcher hands every process its World on the command line, and torchrun says the same in variables. Nothing
here is ever written to the environment: we do not talk to ourselves through it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from unisono.errors import WorldError

_folder = "."
with contextlib.suppress(OSError):  # somebody may have removed it
    _folder = os.getcwd()


@dataclass(frozen=True, kw_only=True)
class World:
    """One process's place in its run."""

    rank: int = 0  # 0 to size - 1
    size: int = 1  # processes in the run
    local_rank: int = 0  # 0 to local_size - 1, on this host
    local_size: int = 1  # processes of this run on this host
    host: str = field(default_factory=socket.gethostname)
    store: str | None = None  # where the processes meet: unix:///path (launch/meeting.py), file:///path, env://
    # (torchrun's variables); None: alone
    number: int | None = None  # of this process for good, whatever its rank becomes; None: its rank
    restarts: int = (
        0  # how often a manager (torchrun, Slurm) has started this run again, as it does when a process dies
    )
    joins: bool = False  # does it come in addition, to processes that are in the midst of it?
    launcher: str = "python"  # who started us: python, unisono, torchrun
    folder: str = field(default_factory=lambda: _folder)  # where the request was typed: its relative paths begin there
    terminal: bool = False  # may rank 0 draw live lines on its standard output?
    columns: int = 0  # of that terminal, as the launcher found it; 0: look yourself
    dry: str = ""  # a folder for the one process that goes through the script before any other starts

    @property
    def is_main(self) -> bool:
        """Rank 0 speaks for all."""
        return self.rank == 0 and not self.dry

    @classmethod
    def current(cls) -> World:
        """The World that our launcher assigned, or torchrun's, or one plain process. Raises WorldError."""
        return _assigned or _from_torchrun() or cls(terminal=draws_live_lines())


RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
"""https://docs.pytorch.org/docs/2.13/elastic/run.html and https://slurm.schedmd.com/sbatch.html: how often it was begun
again."""

_assigned: World | None = None


def assign(world: World | None) -> None:
    """From now on this process is there. None: forget it again."""
    global _assigned
    _assigned = world


def draws_live_lines() -> bool:
    """Is standard output a terminal that can redraw a line?"""
    return sys.stdout is not None and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def variables(names: Iterable[str]) -> dict[str, str]:
    """Those of the named environment variables that are set: for what a library reads, to show and to record."""
    return {name: os.environ[name] for name in names if name in os.environ}


def cache() -> Path:
    """Where what can be made or fetched again is kept: $XDG_CACHE_HOME/unisono, or ~/.cache/unisono."""
    named = os.environ.get("XDG_CACHE_HOME")
    return (Path(named) if named else Path.home() / ".cache") / "unisono"


def inherited(changes: dict[str, str]) -> dict[str, str]:
    """The environment for a process that we start: ours, and the variables that its libraries read."""
    return {**os.environ, **changes}


def _from_torchrun() -> World | None:
    """What torchrun's variables say, None without them. Half of them is a mistake, and training alone would hide it."""
    given = variables(("RANK", "WORLD_SIZE"))
    if not given:
        return None
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if name not in os.environ]
    asked = "Join the processes that torchrun's variables describe: " + ", ".join(f"{k}={v}" for k, v in given.items())
    alone = shlex.join(["env", "-u", "RANK", "-u", "WORLD_SIZE", "python", *sys.argv])
    do = f"{alone} (one process), or start it with torchrun, which sets all of them."
    if missing:
        raise WorldError(asked, f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set.", do)
    rank, size = _number("RANK", asked, do), _number("WORLD_SIZE", asked, do)
    restarts = [_number(name, asked, do) for name in RESTARTS if name in os.environ]
    local = variables(("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    local_rank = _number("LOCAL_RANK", asked, do) if "LOCAL_RANK" in local else 0
    local_size = _number("LOCAL_WORLD_SIZE", asked, do) if "LOCAL_WORLD_SIZE" in local else max(1, local_rank + 1)
    if rank >= size or local_rank >= local_size or local_size > size:
        true = f"Rank {rank} of {size}, and {local_rank} of {local_size} on this host, cannot be."
        raise WorldError(asked, true, do)
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        store="env://",
        launcher="torchrun",
        restarts=sum(restarts),
        terminal=rank == 0 and draws_live_lines(),
    )


def _number(name: str, asked: str, do: str) -> int:
    text = os.environ[name]
    if not text.isdecimal():
        raise WorldError(asked, f"{name} is {text!r}, which is not a number of 0 or more.", do)
    return int(text)
