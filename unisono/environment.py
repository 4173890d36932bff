"""Where this process stands among the processes of its run, as a plain value. The one reader of the environment.

Our own launcher hands every process its World on the command line; torchrun, and Slurm's srun, say the same in
variables. Nothing here is ever written to the environment: we do not talk to ourselves through it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import socket
import sys
import zlib
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
    store: str | None = (
        None  # where the processes meet: unix:///path (launcher/rendezvous_server.py), file:///path, env://
    )
    # (torchrun's variables), hosted://host:port/name (process 0 is its host: distributed/rendezvous/hosted_store.py),
    # group:// (torch's group is there: distributed/existing_group.py); None: alone
    number: int | None = None  # of this process for good, whatever its rank becomes; None: its rank
    restarts: int = 0  # how often a manager (torchrun, Slurm) has begun all of this again, as after a death
    joins: bool = False  # does it come in addition, to processes that are in the midst of it?
    least: int = 0  # processes that must be left for it to go on, if somebody has said so (--ranks MIN:MAX)
    on_cpu: tuple[int, int] = (0, 0)  # ranks from the first to before the second leave accelerators to the others
    launcher: str = "python"  # python, unisono, torchrun, srun, mpirun; script: it has made the group itself
    folder: str = field(default_factory=lambda: _folder)  # where the request was typed: its relative paths begin there
    terminal: bool = False  # may rank 0 draw live lines on its standard output?
    columns: int = 0  # of that terminal, as the launcher found it; 0: look yourself
    dry: str = ""  # a folder for the one process that goes through the script before any other starts

    @property
    def is_main(self) -> bool:
        """Rank 0 speaks for all."""
        return self.rank == 0 and not self.dry

    @property
    def cpu_ranks(self) -> int:
        """So many compute on the CPU beside others."""
        return self.on_cpu[1] - self.on_cpu[0]

    @property
    def seat(self) -> int | None:
        """The number of its accelerator on this host; None: it is to leave them alone."""
        first, end = self.on_cpu
        if first <= self.rank < end:
            return None
        return self.local_rank - (self.cpu_ranks if self.rank >= end else 0)

    @property
    def foreign(self) -> bool:
        """Has somebody else's launcher started all processes of this run?"""
        return self.launcher in ("torchrun", "srun", "mpirun", "script")

    @classmethod
    def current(cls) -> World:
        """The World that our launcher assigned, or torchrun's, or srun's, or one plain process. Raises WorldError."""
        if _assigned is not None:
            return _assigned
        if "RANK" not in os.environ:
            if (world := _from_mpirun()) is not None:  # it may start its processes by srun, whose tasks are hosts then
                return world
            if os.environ.get("SLURM_STEP_NUM_TASKS", "1") not in ("", "1"):
                return _from_srun()
        return _from_torchrun() or cls(terminal=draws_live_lines(), restarts=_restarts())


RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
"""https://docs.pytorch.org/docs/2.13/elastic/run.html and https://slurm.schedmd.com/sbatch.html: how often it was begun
again."""

PORTS = range(20_000, 32_768)
"""Where a job's processes meet unless MASTER_PORT says where: below the ports that Linux gives to whoever asks for any
(ip(7): ip_local_port_range)."""

_assigned: World | None = None


def assign(world: World | None) -> None:
    """From now on this process is there. None: forget it again."""
    global _assigned
    _assigned = world


def assigned() -> bool:
    """Has our launcher started this process?"""
    return _assigned is not None


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


def host_of(store: str | None) -> tuple[str, int] | None:
    """Host and port of the store that a World names, if it is one that processes connect to: env:// or hosted://."""
    if store == "env://":
        at = variables(("MASTER_ADDR", "MASTER_PORT"))
        return (at["MASTER_ADDR"], int(at["MASTER_PORT"])) if len(at) == 2 and at["MASTER_PORT"].isdecimal() else None
    if store is None or not store.startswith("hosted://"):
        return None
    host, _, port = store.removeprefix("hosted://").rpartition("/")[0].rpartition(":")
    return host, int(port)


def job() -> str | None:
    """What Slurm calls the step that this process is in, as in 17.0 (17: the batch script itself); None: Slurm did not
    start it. It stays when a job is put back into the queue."""
    about = variables(("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return ".".join(about.values()) if "SLURM_JOB_ID" in about else None


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
    local = variables(("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    local_rank = _number("LOCAL_RANK", asked, do) if "LOCAL_RANK" in local else 0
    local_size = _number("LOCAL_WORLD_SIZE", asked, do) if "LOCAL_WORLD_SIZE" in local else max(1, local_rank + 1)
    if rank >= size or local_rank >= local_size or local_size > size:
        true = f"Rank {rank} of {size}, and {local_rank} of {local_size} on this host, cannot be."
        raise WorldError(asked, true, do)
    _port(asked)
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
    """What Slurm says to each task of a step (https://slurm.schedmd.com/srun.html, output environment variables).

    Only a step that srun starts has several processes: a batch script is one, whatever SLURM_NTASKS says there. The
    tasks meet on the step's first host, where task 0 is, at a port that follows from the job's number; MASTER_ADDR and
    MASTER_PORT say otherwise, for hosts with names of Slurm's own, and ports that a firewall keeps shut.
    """
    asked = f"Join the {os.environ['SLURM_STEP_NUM_TASKS']} tasks of Slurm's step {job()}."
    do = f"srun -n 2 {shlex.join(['python', *sys.argv])}, which sets all of its variables"
    needed = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE")
    missing = [name for name in needed if name not in os.environ]
    if missing:
        raise WorldError(asked, f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set.", do)
    restarts = _restarts()
    name = f"{job()}-{restarts}"
    address = os.environ.get("MASTER_ADDR") or first_host(os.environ["SLURM_STEP_NODELIST"])
    port = PORTS[zlib.crc32(name.encode()) % len(PORTS)]
    if "MASTER_PORT" in os.environ:
        port = _port(asked)
    tasks = [
        int(count)
        for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ["SLURM_STEP_TASKS_PER_NODE"])
        for _ in range(int(times or 1))
    ]  # 4(x2),3: four on two hosts, three on the last
    rank, size = _number("SLURM_PROCID", asked, do), _number("SLURM_STEP_NUM_TASKS", asked, do)
    local_rank, node = _number("SLURM_LOCALID", asked, do), _number("SLURM_NODEID", asked, do)
    local_size = tasks[node] if node < len(tasks) else 0
    if rank >= size or local_rank >= local_size or local_size > size:  # others would wait for it in vain
        true = f"Task {rank} of {size}, and {local_rank} of {local_size} on node {node}, cannot be."
        raise WorldError(asked, true, do)
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
"""What mpirun says to each process: rank, size, and the same among those of its host. Intel MPI says what MPICH does.
https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html"""


def _from_mpirun() -> World | None:
    """What mpirun's variables say; None without them, for one process, and where Slurm or PMI alone says it.

    mpirun gives no address: MASTER_ADDR and MASTER_PORT do. Without them processes of Open MPI that are all on one host
    meet there, at a port that follows from the job's name.
    """
    maker = next((each for each, names in MPI.items() if os.environ.get(names[1], "1") not in ("", "1")), None)
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if maker is None:
        if os.environ.get("PMIX_RANK", "0") not in ("", "0") and tasks in ("", "1"):
            true = f"PMIX_RANK is {os.environ['PMIX_RANK']}, and no variable says how many processes there are."
            raise WorldError("Join the processes of a PMIx launcher.", true, _instead_of_mpirun(2))
        return None
    rank_name, size_name, local_rank_name, local_size_name = MPI[maker]
    if maker == "MPICH" and tasks == os.environ[size_name]:  # srun --mpi=pmi2
        return None
    asked = f"Join the {os.environ[size_name]} processes that mpirun ({maker}) has started."
    size = _number(size_name, asked, do := _instead_of_mpirun(2))
    do = _instead_of_mpirun(size)
    missing = [name for name in MPI[maker] if name not in os.environ]
    if missing:
        raise WorldError(asked, f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set.", do)
    rank = _number(rank_name, asked, do)
    local_rank, local_size = _number(local_rank_name, asked, do), _number(local_size_name, asked, do)
    if rank >= size or local_rank >= local_size or local_size > size:
        true = f"Rank {rank} of {size}, and {local_rank} of {local_size} on this host, cannot be."
        raise WorldError(asked, true, do)
    name = next(iter(variables(("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")).values()), "")
    at = variables(("MASTER_ADDR", "MASTER_PORT"))
    if len(at) < 2 and (not name or local_size < size):
        missing = [each for each in ("MASTER_ADDR", "MASTER_PORT") if each not in at]
        true = f"mpirun gives no address at which they could meet, and {' and '.join(missing)} "
        true += f"{'is' if len(missing) == 1 else 'are'} not set."
        raise WorldError(asked, true, do)
    name = re.sub(r"\W", "-", name or "mpirun")
    port = _port(asked) if "MASTER_PORT" in at else PORTS[zlib.crc32(name.encode()) % len(PORTS)]
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        store=f"hosted://{at.get('MASTER_ADDR', '127.0.0.1')}:{port}/{name}",
        launcher="mpirun",
        restarts=_restarts(),
        terminal=rank == 0 and draws_live_lines(),
    )


def _instead_of_mpirun(size: int) -> str:
    """What to type where mpirun does not say enough."""
    script = shlex.join(sys.argv)
    here = f"unisono run {script} --ranks {size} (one host)"
    flag, equals = ("-genv", " ") if "PMI_SIZE" in os.environ else ("-x", "=")
    given = " ".join(
        f"{flag} {name}{equals}{value}" for name, value in (("MASTER_ADDR", "HOST"), ("MASTER_PORT", PORTS[0]))
    )
    return f"{here}, or: mpirun {given} -n {size} python {script} (HOST: where rank 0 is)"


def first_host(hosts: str) -> str:
    """The first name of one of Slurm's lists, as in a[01-04,7],b2 (`scontrol show hostnames` writes all of them)."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0] if first else hosts)


def _restarts() -> int:
    """How often a manager has begun all of this again."""
    given = variables(RESTARTS).values()
    return sum(int(count) for count in given if count.isdecimal())


def _port(asked: str) -> int:
    """MASTER_PORT, which somebody may have written by hand."""
    port = _number("MASTER_PORT", asked, do := f"export MASTER_PORT={PORTS[0]} (any port from 1 to 65535 that is free)")
    if not 0 < port < 1 << 16:
        raise WorldError(asked, f"MASTER_PORT is {port}, and ports are numbers from 1 to 65535.", do)
    return port


def _number(name: str, asked: str, do: str) -> int:
    text = os.environ[name]
    if not text.isdecimal():
        raise WorldError(asked, f"{name} is {text!r}, which is not a number of 0 or more.", do)
    return int(text)


def in_a_kernel() -> bool:
    """Does a notebook's kernel run this process?"""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return "ipykernel" in sys.modules and shell is not None
