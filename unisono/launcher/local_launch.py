"""All processes of a run on this host."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType

import psutil  # type: ignore[import-untyped]

import unisono
from unisono.environment import World, draws_live_lines, inherited, variables
from unisono.launcher.elastic_policy import ElasticLauncher, socket_folder
from unisono.launcher.hang_watcher import HangWatcher
from unisono.launcher.supervisor import RunOutcome, WorkerSpec, supervise


def run(
    script: Path,
    arguments: Sequence[str],
    *,
    ranks: int,
    logs: Path,
    threads: int = 1,
    screen: int | None = 1,
    say: bool = True,
    variables: Mapping[str, str] = MappingProxyType({}),
    minimum: int | None = None,
    elastic: bool = False,
    on_cpu: tuple[int, int] = (0, 0),
    columns: int = 0,
) -> RunOutcome:
    """Run the script in `ranks` processes and return when all are gone.

    logs     the folder for rank-N.log, made if it is not there
    threads  of each process; what OpenMP should know before it is loaded
    screen   the file descriptor that rank 0's output goes to, besides its log; None: nowhere
    say      tell on standard error why it failed
    variables  more of what a library, or Python itself, reads from its environment
    minimum  if a process dies, and so many are left, they go on, and another one is started; None: that ends the run
    elastic  do so on accelerators, too
    on_cpu   those from the first to before the second leave accelerators to the others
    columns  of `screen`, which takes live lines though it is no terminal; 0: as standard output does
    """
    terminal = columns > 0 or (screen == 1 and draws_live_lines())
    columns = columns or (os.get_terminal_size(1).columns if terminal else 0)
    # Private (mode 0700), so the processes meet without a port and without a server that somebody else could reach.
    with socket_folder() as folder:
        survives = minimum is not None and ranks > 1
        seats: dict[int, int] = {}  # by number: who replaces process 4, which replaced 2, sits there as well

        def build(number: int, place: int) -> WorkerSpec:
            """Process `number`, in the place of that one."""
            rank = seats[number] = seats.get(place, place)
            world = replace(
                _world(rank, ranks, on_cpu),
                store=f"unix://{folder}/store" if survives else f"file://{folder}/store",
                terminal=terminal,
                columns=columns,
                number=number if survives else None,
                joins=number >= ranks,
                least=(minimum or 0) if elastic else 0,
            )
            environment = inherited({**_for_libraries(threads), **(LEAVE_US_ALONE if elastic else {}), **variables})
            return _task(number, world, [str(script), *arguments], environment, logs, Path(folder))

        tasks = [build(number, number) for number in range(ranks)]
        with HangWatcher(Path(folder), say=say), ExitStack() as open_:
            survival = ElasticLauncher(minimum or 1, build) if survives else None
            if survival is not None:
                open_.enter_context(survival.open(Path(folder) / "store", ranks, _python()))
            return supervise(tasks, screen=screen, say=say, survival=survival)


def alone(script: Path, arguments: Sequence[str], *, folder: Path, threads: int = 1) -> int:
    """Run the script as plain Python does, with this terminal, for who wants to talk to it; returns its exit status.
    Ctrl-C is its own affair."""
    command = [sys.executable, "-u", str(script), *arguments]
    with subprocess.Popen(command, cwd=folder, env=inherited(_for_libraries(threads))) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                continue


DRY_SECONDS = 60
"""A script that takes longer to come to its loop is not waited for: what is wrong with its model, the run will say."""


def dry_run(
    script: Path,
    arguments: Sequence[str],
    *,
    ranks: int,
    threads: int = 1,
    on_cpu: tuple[int, int] = (0, 0),
    seconds: int = DRY_SECONDS,
) -> RunOutcome:
    """One process goes through the script as far as its loop, to see whether `ranks` of them can
    (train/diagnostics/dry_run.py). What it prints is nobody's; after `seconds` it dies of SIGALRM."""
    with socket_folder() as folder:
        world = replace(_world(ranks - 1, ranks, on_cpu), dry=folder)
        environment = inherited(_for_libraries(threads))
        task = _task(0, world, [str(script), *arguments], environment, Path(folder), Path(folder), seconds)
        return supervise([task], screen=None, say=False)


def _world(rank: int, size: int, on_cpu: tuple[int, int]) -> World:
    """A process of ours among `size` on this host."""
    return World(
        rank=rank,
        size=size,
        local_rank=rank,
        local_size=size,
        host=socket.gethostname(),
        on_cpu=on_cpu,
        launcher="unisono",
        folder=os.getcwd(),
    )


def _task(
    number: int,
    world: World,
    words: Sequence[str],
    environment: Mapping[str, str],
    logs: Path,
    folder: Path,
    seconds: int = 0,
) -> WorkerSpec:
    """Process `number`, which runs a script (`words`: its path and its arguments); it is a substitute if it joins.
    After `seconds` it ends; 0: it does not."""
    record = folder / f"rank-{number}.json"
    order = json.dumps({"world": asdict(world), "record": str(record), "seconds": seconds, "launcher": os.getpid()})
    return WorkerSpec(
        command=[*_python(), "-m", "unisono.launcher.worker_main", order, *words],
        environment=environment,
        log=logs / f"rank-{number}.log",
        record=record,
        substitute=world.joins,
    )


LEAVE_US_ALONE = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",  # which turns that on again
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
"""Else NCCL's watchdog ends every process whose peer is gone, at once or after minutes, and waits for dumps meanwhile.
https://docs.pytorch.org/docs/2.13/torch_nccl_environment_variables.html"""


HASHES = "PYTHONHASHSEED"
"""What Python's hashes of texts begin with. It is the same in all processes, and in every run, so that a set of texts
has one order."""


def _for_libraries(threads: int) -> dict[str, str]:
    """The variables that libraries read before any of our code runs. Nothing else is said this way."""
    found = {"OMP_NUM_THREADS": str(threads)}
    if not variables([HASHES]):
        found[HASHES] = "0"
    loopback = loopback_name()
    if loopback is not None:
        found["GLOO_SOCKET_IFNAME"] = loopback  # all on one host: nothing needs to leave it
    return found


def loopback_name() -> str | None:
    """The network interface with 127.0.0.1, mostly `lo`; None where there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.family == socket.AF_INET and a.address.startswith("127.") for a in addresses):
            return name
    return None


def _python() -> list[str]:
    """This Python, without buffers. -P keeps the folder one happens to be in from hiding modules of the library."""
    here = Path(unisono.__file__).resolve().parents[1]
    from_here = not sys.flags.safe_path and Path(sys.path[0] or ".").resolve() == here
    return [sys.executable, "-u"] if from_here else [sys.executable, "-u", "-P"]
