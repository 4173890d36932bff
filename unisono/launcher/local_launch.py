"""Start all processes of a run, on this host or on several."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType

import psutil  # type: ignore[import-untyped]

import unisono
from unisono.environment import ONE_EACH, DeviceAssignment, World, draws_live_lines, inherited, variables
from unisono.errors import UnisonoError
from unisono.launcher.elastic_policy import ElasticLauncher, socket_folder
from unisono.launcher.hang_watcher import HangWatcher
from unisono.launcher.hosts.cluster import Cluster
from unisono.launcher.supervisor import RunOutcome, WorkerSpec, supervise
from unisono.security.audit_trail import Record, unrecorded


def run(
    script: Path,
    arguments: Sequence[str],
    *,
    ranks: int,
    logs: Path,
    threads: int = 1,
    screen: int | None = 1,
    verbose: bool = True,
    variables: Mapping[str, str] = MappingProxyType({}),
    minimum: int | None = None,
    elastic: bool = False,
    devices: DeviceAssignment = ONE_EACH,
    columns: int = 0,
    cluster: Cluster | None = None,
    audit: Record = unrecorded,
) -> RunOutcome:
    """Run the script in `ranks` processes and return when all have ended.

    Args:
        script: the path of the script.
        arguments: the arguments of the script.
        ranks: the number of processes.
        logs: the folder for rank-N.log, created if it does not exist.
        threads: the number of threads of each process, for OpenMP, which reads it when it is loaded.
        screen: the file descriptor for rank 0's output, besides its log; None: none.
        verbose: print messages about the run, such as its failure, on standard error.
        variables: further environment variables for libraries or Python itself.
        minimum: when a process dies and this many remain, they continue, and a replacement is started; None: a death
            ends the run.
        elastic: the same on accelerators.
        devices: the device of each rank.
        columns: width of `screen`, which shows live lines without being a terminal; 0: use standard output's.
        cluster: the hosts on which they run; None: this one.
        audit: records processes that join, leave or are lost, hosts that are refused, and stops.

    Raises:
        SettingsError: a host of the cluster cannot be reached, or differs from this one.
    """
    terminal = columns > 0 or (screen == 1 and draws_live_lines())
    columns = columns or (os.get_terminal_size(1).columns if terminal else 0)
    # The folder is private (mode 0700), so the rendezvous needs no port, and no other user can reach it.
    with socket_folder() as private, ExitStack() as stack:
        folder, survives = Path(private), (minimum is not None and ranks > 1) or cluster is not None
        changes = {**_for_libraries(threads), **(NO_NCCL_WATCHDOG if elastic else {}), **variables}
        base = replace(
            _world(0, ranks, devices),
            store=f"unix://{folder}/store" if survives else f"file://{folder}/store",
            terminal=terminal,
            columns=columns,
            least=(minimum or 0) if elastic else 0,
        )
        command = [str(script), *arguments]
        builder = SpecBuilder(base, command, changes, logs, folder, cluster, survives=survives, audit=audit)
        stack.enter_context(HangWatcher(folder, verbose=verbose))
        elastic_launcher = ElasticLauncher(minimum or 1, builder.build) if survives else None
        if elastic_launcher is not None:
            stack.enter_context(elastic_launcher.open(folder / "store", ranks, _python()))
        if cluster is not None:
            stack.enter_context(_opened(cluster, folder / "store", script, logs.parent, audit))
        specs = [builder.build(number, number) for number in range(ranks)]
        outcome = supervise(specs, screen=screen, verbose=verbose, elastic=elastic_launcher)
        if cluster is not None:
            cluster.status = -1 if outcome.failure is not None and outcome.failure.is_death else outcome.final_status
        return outcome


@contextmanager
def _opened(cluster: Cluster, store: Path, script: Path, run_dir: Path, audit: Record) -> Iterator[None]:
    """Connect to the hosts, and record those that are refused."""
    with ExitStack() as stack:
        try:
            stack.enter_context(cluster.open(store, script, run_dir))
        except UnisonoError as error:
            for problem in error.problems:
                audit("refusal", reason=f"{problem.error} {problem.facts}")
            raise
        yield


class SpecBuilder:
    """Build the specifications of processes, also of those that replace others.

    Args:
        base: the place in the run of rank 0.
        command: the script's path and its arguments.
        changes: environment variables for libraries.
        logs: the folder for logs.
        folder: the launcher's private folder.
        cluster: the hosts; None: this one.
        survives: whether processes continue without one that dies.
        audit: records what happens to them.
    """

    def __init__(
        self,
        base: World,
        command: Sequence[str],
        changes: Mapping[str, str],
        logs: Path,
        folder: Path,
        cluster: Cluster | None,
        *,
        survives: bool,
        audit: Record = unrecorded,
    ) -> None:
        self._audit = audit
        self._base, self._command, self._changes = base, command, changes
        self._logs, self._folder, self._cluster, self._survives = logs, folder, cluster, survives
        self._ranks: dict[
            int, int
        ] = {}  # by number: the replacement of process 4, which replaced 2, has rank 2 as well

    def build(self, number: int, replaced: int) -> WorkerSpec:
        """Return the specification of process `number`, which replaces another one or itself."""
        rank = self._ranks[number] = self._ranks.get(replaced, replaced)
        base, changes = self._base, dict(self._changes)
        world = replace(
            base,
            rank=rank,
            local_rank=rank,
            number=number if self._survives else None,
            joins=number >= base.size,
        )
        if self._cluster is None:
            spec = _spec(number, world, self._command, inherited(changes), self._logs, self._folder)
            return replace(spec, audit=self._audit, place={"host": world.host})
        if number != replaced:
            self._cluster.replace(number, replaced)
        world = self._cluster.world(number, world)
        changes |= self._cluster.environment(number)
        spec = _spec(number, world, self._command, inherited(changes), self._logs, self._folder)
        place = {"host": world.host, "address": self._cluster.reached_at(number)}
        spec = replace(spec, audit=self._audit, place=place)
        start = self._cluster.start(number, world)
        if self._cluster.is_here(number):
            return replace(spec, start=start)
        return replace(spec, command=self._command, environment=changes, start=start)


def alone(script: Path, arguments: Sequence[str], *, folder: Path, threads: int = 1) -> int:
    """Run the script as plain Python does, with this terminal as its standard input. Return its exit status.

    The script handles Ctrl-C itself.
    """
    command = [sys.executable, "-u", str(script), *arguments]
    with subprocess.Popen(command, cwd=folder, env=inherited(_for_libraries(threads))) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                continue


DRY_SECONDS = 60
"""Time limit of a dry run. A script that takes longer to reach its loop is checked by the run itself."""


def dry_run(
    script: Path,
    arguments: Sequence[str],
    *,
    ranks: int,
    threads: int = 1,
    devices: DeviceAssignment = ONE_EACH,
    seconds: int = DRY_SECONDS,
) -> RunOutcome:
    """Run the script in one process up to its loop, to check whether `ranks` processes could run it.

    See train/diagnostics/dry_run.py. Its output is discarded. After `seconds` it dies of SIGALRM.
    """
    with socket_folder() as folder:
        world = replace(_world(ranks - 1, ranks, devices), dry=folder)
        environment = inherited(_for_libraries(threads))
        spec = _spec(0, world, [str(script), *arguments], environment, Path(folder), Path(folder), seconds)
        return supervise([spec], screen=None, verbose=False)


def _world(rank: int, size: int, devices: DeviceAssignment) -> World:
    """Return the place of a process among `size` on this host."""
    return World(
        rank=rank,
        size=size,
        local_rank=rank,
        local_size=size,
        host=socket.gethostname(),
        devices=devices,
        launcher="unisono",
        folder=os.getcwd(),
    )


def _spec(
    number: int,
    world: World,
    command: Sequence[str],
    environment: Mapping[str, str],
    logs: Path,
    folder: Path,
    seconds: int = 0,
) -> WorkerSpec:
    """Return the specification of a process.

    Args:
        number: the number of the process.
        world: its place in the run; it is a replacement if it joins.
        command: the script's path and its arguments.
        environment: all environment variables.
        logs: the folder for logs.
        folder: the launcher's private folder.
        seconds: the time after which the process dies; 0: no limit.
    """
    record, log = folder / f"rank-{number}.json", logs / f"rank-{number}.log"
    order = json.dumps(
        {
            "world": asdict(world),
            "record": str(record),
            "log": str(log.absolute()),
            "seconds": seconds,
            "launcher": os.getpid(),
        }
    )
    return WorkerSpec(
        command=[*_python(), "-m", "unisono.launcher.worker_main", order, *command],
        environment=environment,
        log=log,
        record=record,
        replacement=world.joins,
    )


NO_NCCL_WATCHDOG = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",  # it turns error handling on again
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
"""Otherwise NCCL's watchdog ends every process that lost a peer, at once or after minutes, and waits for dumps.
https://docs.pytorch.org/docs/2.13/torch_nccl_environment_variables.html"""


HASH_SEED = "PYTHONHASHSEED"
"""The seed of Python's hashes of strings. It is the same in all processes and runs, so that sets of strings have one
order."""


def _for_libraries(threads: int) -> dict[str, str]:
    """Return the variables that libraries read before our code runs. Nothing else is passed this way."""
    found = {"OMP_NUM_THREADS": str(threads)}
    if not variables([HASH_SEED]):
        found[HASH_SEED] = "0"
    loopback = loopback_name()
    if loopback is not None:
        found["GLOO_SOCKET_IFNAME"] = loopback  # no message needs to leave this host
    return found


def loopback_name() -> str | None:
    """Return the name of the network interface with 127.0.0.1, mostly `lo`; None if there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.family == socket.AF_INET and a.address.startswith("127.") for a in addresses):
            return name
    return None


def _python() -> list[str]:
    """Return the command of this Python, unbuffered. -P: modules in the current folder do not hide the library's."""
    here = Path(unisono.__file__).resolve().parents[1]
    from_here = not sys.flags.safe_path and Path(sys.path[0] or ".").resolve() == here
    return [sys.executable, "-u"] if from_here else [sys.executable, "-u", "-P"]
