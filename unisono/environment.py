"""This process's place in its run, as a plain value. The only reader of environment variables.

Our own launcher passes a World to every process on the command line. torchrun, Slurm's srun and mpirun set variables
instead. Only variables that other libraries read are ever set: Unisono's processes do not communicate through them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import socket
import sys
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from unisono.errors import WorldError

_folder = "."
with contextlib.suppress(OSError):  # the folder may have been removed
    _folder = os.getcwd()


class DeviceAssignment(NamedTuple):
    """The device of each rank on a host.

    first_on_cpu      first of the ranks that compute on the CPU, while others use accelerators
    end_on_cpu        the rank behind the last of these
    ranks_per_device  number of ranks that share an accelerator
    """

    first_on_cpu: int = 0
    end_on_cpu: int = 0
    ranks_per_device: int = 1

    @property
    def cpu_ranks(self) -> int:
        """The number of ranks that compute on the CPU."""
        return self.end_on_cpu - self.first_on_cpu

    def index_of(self, rank: int, local_rank: int) -> int | None:
        """Return the index of the accelerator of a rank; None for the CPU."""
        if self.first_on_cpu <= rank < self.end_on_cpu:
            return None
        return (local_rank - (self.cpu_ranks if rank >= self.end_on_cpu else 0)) // self.ranks_per_device


ONE_EACH = DeviceAssignment()
"""Each rank has an accelerator of its own."""


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
        least: processes that must remain for the run to continue (--ranks MIN:MAX); 0: not given.
        devices: the device of each rank.
        launcher: python, unisono, torchrun, srun or mpirun; script: the script has made a process group itself.
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
        return self.launcher in ("torchrun", "srun", "mpirun", "script")

    @classmethod
    def current(cls) -> World:
        """Return the World of our launcher, or of mpirun, srun or torchrun, or of a single process.

        Raises:
            WorldError: the variables of a launcher are incomplete or contradict each other.
        """
        if _assigned is not None:
            return _assigned
        if "RANK" not in os.environ:
            if (world := _from_mpirun()) is not None:  # mpirun may use srun, whose tasks are then hosts
                return world
            if os.environ.get("SLURM_STEP_NUM_TASKS", "1") not in ("", "1"):
                return _from_srun()
        return _from_torchrun() or cls(terminal=draws_live_lines(), restarts=_restarts())


RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
"""Variables with the number of restarts.
https://docs.pytorch.org/docs/2.13/elastic/run.html and https://slurm.schedmd.com/sbatch.html"""

PORTS = range(20_000, 32_768)
"""Ports for a job without MASTER_PORT: below those that Linux assigns to programs (ip(7): ip_local_port_range)."""

_assigned: World | None = None


def assign(world: World | None) -> None:
    """Set this process's place in its run. None: unset it."""
    global _assigned
    _assigned = world


def assigned() -> bool:
    """Return whether our launcher has started this process."""
    return _assigned is not None


def draws_live_lines() -> bool:
    """Return whether standard output is a terminal that can redraw a line."""
    return sys.stdout is not None and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def wants_color(terminal: bool) -> bool:
    """Return whether output is colored: on a terminal, or where FORCE_COLOR is set; never where NO_COLOR is set.

    See https://no-color.org and https://force-color.org. An empty value counts as not set, and so does FORCE_COLOR=0.
    """
    given = variables(("NO_COLOR", "FORCE_COLOR"))
    return not given.get("NO_COLOR") and (terminal or given.get("FORCE_COLOR", "") not in ("", "0"))


def terminal_columns() -> int:
    """Return the width of the terminal at standard output; 0: it is none, or its width is unknown."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns
    except (OSError, ValueError, AttributeError):
        return 0


def variables(names: Iterable[str]) -> dict[str, str]:
    """Return those of the named environment variables that are set."""
    return {name: os.environ[name] for name in names if name in os.environ}


def cache() -> Path:
    """Return the cache folder: $XDG_CACHE_HOME/unisono, or ~/.cache/unisono."""
    given = os.environ.get("XDG_CACHE_HOME")
    return (Path(given) if given else Path.home() / ".cache") / "unisono"


def host_of(store: str | None) -> tuple[str, int] | None:
    """Return host and port of a World's store, if it has them: env:// or hosted://."""
    if store == "env://":
        at = variables(("MASTER_ADDR", "MASTER_PORT"))
        return (at["MASTER_ADDR"], int(at["MASTER_PORT"])) if len(at) == 2 and at["MASTER_PORT"].isdecimal() else None
    if store is None or not store.startswith("hosted://"):
        return None
    host, _, port = store.removeprefix("hosted://").rpartition("/")[0].rpartition(":")
    return host, int(port)


def job() -> str | None:
    """Return Slurm's name of this process's step, such as 17.0 (17: the batch script itself); None without Slurm.

    It does not change when a job is requeued.
    """
    ids = variables(("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return ".".join(ids.values()) if "SLURM_JOB_ID" in ids else None


def set_for_libraries(name: str, value: str) -> None:
    """Set a variable that a library of this process will read, unless the user has set it."""
    os.environ.setdefault(name, value)


def inherited(changes: dict[str, str]) -> dict[str, str]:
    """Return the environment for a process that Unisono starts: this one's, with changes for its libraries."""
    return {**os.environ, **changes}


def _from_torchrun() -> World | None:
    """Return the World of torchrun's variables; None without them.

    Raises:
        WorldError: only some of them are set. Training with one process would hide that mistake.
    """
    given = variables(("RANK", "WORLD_SIZE"))
    if not given:
        return None
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if name not in os.environ]
    error_line = "Invalid torchrun variables: " + ", ".join(f"{k}={v}" for k, v in given.items()) + "."
    alone = shlex.join(["env", "-u", "RANK", "-u", "WORLD_SIZE", "python", *sys.argv])
    next_step = f"{alone} (one process), or start it with torchrun, which sets all of them."
    if missing:
        raise WorldError(error_line, _not_set(missing), next_step)
    rank, size = _number("RANK", error_line, next_step), _number("WORLD_SIZE", error_line, next_step)
    local = variables(("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    local_rank = _number("LOCAL_RANK", error_line, next_step) if "LOCAL_RANK" in local else 0
    local_size = max(1, local_rank + 1)
    if "LOCAL_WORLD_SIZE" in local:
        local_size = _number("LOCAL_WORLD_SIZE", error_line, next_step)
    _check_ranks(rank, size, local_rank, local_size, error_line, next_step)
    _port(error_line)
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        store="env://",
        launcher="torchrun",
        restarts=_restarts(),
        terminal=rank == 0 and draws_live_lines(),
    )


def _from_srun() -> World:
    """Return the World of a task of a Slurm step (https://slurm.schedmd.com/srun.html, output environment variables).

    Only a step that srun starts has several processes: a batch script is one, whatever SLURM_NTASKS is there. The store
    is on the step's first host, where task 0 is, at a port that follows from the job's number. MASTER_ADDR and
    MASTER_PORT override that, where Slurm's host names do not resolve or a firewall blocks the port.
    """
    error_line = f"Cannot join the {os.environ['SLURM_STEP_NUM_TASKS']} tasks of Slurm's step {job()}."
    next_step = f"srun -n 2 {shlex.join(['python', *sys.argv])}, which sets all of its variables"
    needed = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE")
    missing = [name for name in needed if name not in os.environ]
    if missing:
        raise WorldError(error_line, _not_set(missing), next_step)
    restarts = _restarts()
    name = f"{job()}-{restarts}"
    address = os.environ.get("MASTER_ADDR") or first_host(os.environ["SLURM_STEP_NODELIST"])
    port = PORTS[zlib.crc32(name.encode()) % len(PORTS)]
    if "MASTER_PORT" in os.environ:
        port = _port(error_line)
    tasks = [
        int(count)
        for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ["SLURM_STEP_TASKS_PER_NODE"])
        for _ in range(int(times or 1))
    ]  # 4(x2),3: four on each of two hosts, three on the last
    rank = _number("SLURM_PROCID", error_line, next_step)
    size = _number("SLURM_STEP_NUM_TASKS", error_line, next_step)
    local_rank = _number("SLURM_LOCALID", error_line, next_step)
    node = _number("SLURM_NODEID", error_line, next_step)
    local_size = tasks[node] if node < len(tasks) else 0
    _check_ranks(rank, size, local_rank, local_size, error_line, next_step)
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        store=f"hosted://{address}:{port}/{name}",
        launcher="srun",
        restarts=restarts,
        terminal=rank == 0 and draws_live_lines(),
    )


MPI = {
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
"""The variables of mpirun: rank, size, local rank and local size. Intel MPI sets those of MPICH.
https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html"""


def _from_mpirun() -> World | None:
    """Return the World of mpirun's variables; None without them, for one process, and under Slurm's or PMI's launcher.

    mpirun gives no address, so MASTER_ADDR and MASTER_PORT are needed. Without them processes of Open MPI that are all
    on one host use a port there that follows from the job's name.

    Raises:
        WorldError: the variables are incomplete or contradict each other, or an address is missing.
    """
    implementation = next((each for each, names in MPI.items() if os.environ.get(names[1], "1") not in ("", "1")), None)
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if implementation is None:
        if os.environ.get("PMIX_RANK", "0") not in ("", "0") and tasks in ("", "1"):
            fact = f"PMIX_RANK is {os.environ['PMIX_RANK']}, and no variable gives the number of processes."
            raise WorldError("Cannot join the processes of a PMIx launcher.", fact, _instead_of_mpirun(2))
        return None
    rank_name, size_name, local_rank_name, local_size_name = MPI[implementation]
    if implementation == "MPICH" and tasks == os.environ[size_name]:  # srun --mpi=pmi2
        return None
    error_line = f"Cannot join the {os.environ[size_name]} processes that mpirun ({implementation}) has started."
    size = _number(size_name, error_line, _instead_of_mpirun(2))
    next_step = _instead_of_mpirun(size)
    missing = [name for name in MPI[implementation] if name not in os.environ]
    if missing:
        raise WorldError(error_line, _not_set(missing), next_step)
    rank = _number(rank_name, error_line, next_step)
    local_rank = _number(local_rank_name, error_line, next_step)
    local_size = _number(local_size_name, error_line, next_step)
    _check_ranks(rank, size, local_rank, local_size, error_line, next_step)
    name = next(iter(variables(("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")).values()), "")
    address = variables(("MASTER_ADDR", "MASTER_PORT"))
    if len(address) < 2 and (not name or local_size < size):
        missing = [each for each in ("MASTER_ADDR", "MASTER_PORT") if each not in address]
        fact = f"mpirun gives no address for their rendezvous, and {_not_set(missing)}"
        raise WorldError(error_line, fact, next_step)
    name = re.sub(r"\W", "-", name or "mpirun")
    port = _port(error_line) if "MASTER_PORT" in address else PORTS[zlib.crc32(name.encode()) % len(PORTS)]
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        store=f"hosted://{address.get('MASTER_ADDR', '127.0.0.1')}:{port}/{name}",
        launcher="mpirun",
        restarts=_restarts(),
        terminal=rank == 0 and draws_live_lines(),
    )


def _instead_of_mpirun(size: int) -> str:
    """Return commands to use where mpirun's variables are not enough."""
    script = shlex.join(sys.argv)
    here = f"unisono run {script} --ranks {size} (one host)"
    flag, equals = ("-genv", " ") if "PMI_SIZE" in os.environ else ("-x", "=")
    given = " ".join(
        f"{flag} {name}{equals}{value}" for name, value in (("MASTER_ADDR", "HOST"), ("MASTER_PORT", PORTS[0]))
    )
    return f"{here}, or: mpirun {given} -n {size} python {script} (HOST: where rank 0 is)"


def first_host(hosts: str) -> str:
    """Return the first host of a Slurm host list such as a[01-04,7],b2 (see `scontrol show hostnames`)."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0] if first else hosts)


def _restarts() -> int:
    """Return how often torchrun or Slurm has restarted all processes."""
    given = variables(RESTARTS).values()
    return sum(int(count) for count in given if count.isdecimal())


def _not_set(names: Sequence[str]) -> str:
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} not set."


def _check_ranks(rank: int, size: int, local_rank: int, local_size: int, error_line: str, next_step: str) -> None:
    """Raise WorldError for ranks that contradict the sizes: other processes would wait in vain."""
    if rank >= size or local_rank >= local_size or local_size > size:
        fact = f"Rank {rank} of {size} is impossible with local rank {local_rank} of {local_size} on this host."
        raise WorldError(error_line, fact, next_step)


def _port(error_line: str) -> int:
    """Return MASTER_PORT, which may be written by hand. Raises WorldError if it is not a port."""
    next_step = f"export MASTER_PORT={PORTS[0]} (any port from 1 to 65535 that is free)"
    port = _number("MASTER_PORT", error_line, next_step)
    if not 0 < port < 1 << 16:
        raise WorldError(error_line, f"MASTER_PORT is {port}; ports are numbers from 1 to 65535.", next_step)
    return port


def _number(name: str, error_line: str, next_step: str) -> int:
    text = os.environ[name]
    if not text.isdecimal():
        raise WorldError(error_line, f"{name} is {text!r}, which is not a non-negative integer.", next_step)
    return int(text)


def in_a_kernel() -> bool:
    """Return whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return "ipykernel" in sys.modules and shell is not None
