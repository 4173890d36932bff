"""This process's place in its run, as a plain value.

Our own launcher passes a World to every process on the command line (assign). Other launchers set variables, which the
readers of engines/ understand.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from unisono.environment.restart_count import restart_count
from unisono.environment.terminal import draws_live_lines, terminal_columns

_folder = "."
with contextlib.suppress(OSError):  # the folder may have been removed
    _folder = os.getcwd()


class DeviceAssignment(NamedTuple):
    """The device of each rank on a host.

    first_on_cpu      first of the ranks that compute on the CPU, while others use accelerators
    end_on_cpu        the rank after the last of these
    ranks_per_device  number of ranks that share an accelerator
    sees_only_own     whether a process sees no accelerator but its own
    """

    first_on_cpu: int = 0
    end_on_cpu: int = 0
    ranks_per_device: int = 1
    sees_only_own: bool = False

    @property
    def cpu_ranks(self) -> int:
        """The number of ranks that compute on the CPU."""
        return self.end_on_cpu - self.first_on_cpu

    def index_of(self, rank: int, local_rank: int) -> int | None:
        """Return the index of the accelerator of a rank; None for the CPU."""
        if self.first_on_cpu <= rank < self.end_on_cpu:
            return None
        if self.sees_only_own:
            return 0
        return (local_rank - (self.cpu_ranks if rank >= self.end_on_cpu else 0)) // self.ranks_per_device


ONE_EACH = DeviceAssignment()
"""Each rank has an accelerator of its own."""


OWN_LAUNCHERS = ("python", "unisono", "test")
"""A single process, our launcher, and unisono/testing."""


@dataclass(frozen=True, kw_only=True)
class World:
    """One process's place in its run.

    Attributes:
        rank: 0 to size - 1.
        size: number of processes in the run.
        local_rank: 0 to local_size - 1, on this host.
        local_size: number of processes of the run on this host.
        host: the name of this host.
        store: where the processes find each other: unix:///path (launcher/rendezvous_server.py), file:///path, env://
            (torchrun's variables), hosted://host:port/name (distributed/rendezvous/hosted_store.py), group:// (a torch
            group exists: distributed/existing_group.py); None for a single process.
        number: of this process, which never changes; None: its rank.
        restarts: how often torchrun or Slurm has restarted all processes.
        joins: whether it joins processes that are training already.
        open_link: whether programs that are no members may reach the store, and read what hosts send to it.
        least: processes that must remain for the run to continue (--ranks MIN:MAX); 0: not given.
        devices: the device of each rank.
        launcher: python, unisono, the name that an engine's reader gives (torchrun, srun, mpirun, kubernetes, ...), or
            script: the script has made a process group itself.
        folder: where the command was typed; relative paths in it begin there.
        terminal: whether rank 0 may draw live lines on its standard output.
        columns: width of that terminal, as the launcher found it; 0: unknown.
        dry: a folder, in the one process of a dry run, before any other starts.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    host: str = field(default_factory=socket.gethostname)
    store: str | None = None
    number: int | None = None
    restarts: int = 0
    joins: bool = False
    open_link: bool = False
    least: int = 0
    devices: DeviceAssignment = ONE_EACH
    launcher: str = "python"
    folder: str = field(default_factory=lambda: _folder)
    terminal: bool = False
    columns: int = 0
    dry: str = ""

    @property
    def is_main(self) -> bool:
        """Whether this process prints for all."""
        return self.rank == 0 and not self.dry

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", DeviceAssignment(*self.devices))  # a list, where it was read from JSON

    @property
    def width(self) -> int:
        """Columns of the terminal that shows this process's output; 0: there is none, so lines may have any length."""
        return (self.columns or terminal_columns()) if self.terminal else 0

    @property
    def cpu_ranks(self) -> int:
        """The number of ranks that compute on the CPU, while others use accelerators."""
        return self.devices.cpu_ranks

    @property
    def device_index(self) -> int | None:
        """The index of its accelerator on this host; None if it computes on the CPU."""
        return self.devices.index_of(self.rank, self.local_rank)

    @property
    def foreign(self) -> bool:
        """Whether another launcher than ours has started all processes of this run."""
        return self.launcher not in OWN_LAUNCHERS

    @classmethod
    def current(cls) -> World:
        """Return the World that our launcher or an engine (engines/) gives this process, or that of a single process.

        Raises:
            WorldError: the variables of an engine are incomplete or contradict each other.
        """
        if _assigned is not None:
            return _assigned
        found = next((world for read in _readers if (world := read()) is not None), None)
        return found or cls(terminal=draws_live_lines(), restarts=restart_count())


_assigned: World | None = None
_readers: list[Callable[[], World | None]] = []


def use_readers(readers: Sequence[Callable[[], World | None]]) -> None:
    """Set the readers that World.current asks, in this order. A reader returns None where its engine is absent."""
    _readers[:] = readers


def assign(world: World | None) -> None:
    """Set this process's place in its run. None: unset it."""
    global _assigned
    _assigned = world


def assigned() -> bool:
    """Return whether our launcher has started this process."""
    return _assigned is not None
