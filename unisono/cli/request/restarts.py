"""Restart all processes of a run when one of them has died and the others cannot continue without it.

    start --- a process dies (SIGKILL, SIGSEGV, ...) --- start again from the newest checkpoint, or from the beginning
          --- an exception leaves the script ----------- the run fails; it would fail again
          --- Ctrl-C or SIGTERM ------------------------ the run stops

A process may also die before the first step: while Python imports torch, while the script downloads its data, while
the process group is formed. Nothing is lost then, and the other processes wait for it anyway, so restarting all of them
costs no more time than restarting one.

The number of restarts is bounded: after `RESTARTS` restarts in a row without a new checkpoint the run fails.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from unisono.checkpoint import emergency_dump
from unisono.checkpoint.storage import checkpoints_at, storages_of
from unisono.cli.request.run_options import RunRequest
from unisono.config.wording import plural
from unisono.environment import ONE_EACH, DeviceAssignment
from unisono.errors import UnisonoError
from unisono.launcher import local_launch
from unisono.launcher.hosts.cluster import Cluster, Connector
from unisono.launcher.hosts.host_list import ListedHost
from unisono.launcher.supervisor import RunOutcome
from unisono.security.audit_trail import Record, unrecorded

RESTARTS = 3
"""Restarts in a row without a new checkpoint, after which the run fails."""


class RankRange(NamedTuple):
    """The number of processes.

    least    processes that must be left for the others to continue after a death
    usual    processes that are started
    elastic  whether both numbers were given (--ranks MIN:MAX)
    devices  the device of each rank
    """

    least: int
    usual: int
    elastic: bool
    devices: DeviceAssignment = ONE_EACH


class Hosts(NamedTuple):
    """The hosts of a run, and what connects to them."""

    listed: Sequence[ListedHost]
    connector: Connector

    def without(self, lost: Collection[str], ranks: RankRange) -> tuple[Hosts, int]:
        """Return the hosts that are left, and how many processes to start on them.

        Fewer than before only with --ranks MIN:MAX: the axes of a model may need all. Where hosts have room for too few
        processes, all hosts are tried again, with all processes.
        """
        left = [host for host in self.listed if host.name not in lost]
        room = sum(host.slots for host in left)
        if not self.connector.can_leave_out or room < (ranks.least if ranks.elastic else ranks.usual):
            return self, ranks.usual
        return self._replace(listed=left), min(room, ranks.usual)


def run_with_restarts(
    script: Path,
    request: RunRequest,
    run_dir: Path,
    ranks: RankRange,
    *,
    threads: int,
    screen: int = 1,
    columns: int = 0,
    say: bool = True,
    hosts: Hosts | None = None,
    audit: Record = unrecorded,
) -> RunOutcome:
    """Run the script, and restart all processes whenever one has died and the others could not continue.

    screen, columns  as for `local_launch.run`
    say              its argument `verbose`
    hosts            the hosts on which the processes run; None: this one
    audit            records the processes that join and leave
    """
    emergency_dump.clear(run_dir)
    reached, failures, count = _saved(run_dir), 0, ranks.usual
    while True:
        cluster = Cluster(hosts.listed, count, hosts.connector, say_line) if hosts is not None else None
        outcome = local_launch.run(
            script,
            request.arguments(run_dir),
            ranks=count,
            logs=run_dir / "log",
            threads=threads,
            minimum=ranks.least,
            elastic=ranks.elastic,
            devices=ranks.devices,
            screen=screen,
            columns=columns,
            verbose=say,
            cluster=cluster,
            audit=audit,
        )
        if outcome.stopped or outcome.failure is None or not outcome.failure.is_death:
            return outcome
        saved, dumped = _saved(run_dir), emergency_dump.dumped_steps(run_dir)
        now = max(saved, dumped)
        failures, reached = (1 if now > reached else failures + 1), now
        if failures > RESTARTS:
            print(
                f"Stopped restarting: the run died {failures} times without a new checkpoint.",
                file=sys.stderr,
                flush=True,
            )
            return outcome
        where = f"the checkpoint after step {saved}" if saved else "the beginning, because nothing was saved yet"
        if dumped > saved:
            where = f"the emergency dump after step {dumped}, or {where}"
        audit("restart", reason=str(outcome.failure).partition("\n")[0], number=failures)
        print(f"Restarting from {where} ({failures} of {RESTARTS}).", file=sys.stderr, flush=True)
        request = replace(request, resume=True)
        if hosts is not None and cluster is not None:
            hosts, count = hosts.without(cluster.lost, ranks)
            if count < ranks.usual:
                say_line(f"Without the lost hosts there is room for {plural(count, 'process', 'processes')}.")


def say_line(text: str) -> None:
    """Print a line on standard error."""
    print(text, file=sys.stderr, flush=True)


def _saved(run_dir: Path) -> int:
    """Return the step of the newest checkpoint; 0 if there is none, or if its place cannot be read."""
    with suppress(UnisonoError):
        return max((steps for there in storages_of(run_dir) for steps in checkpoints_at(there)), default=0)
    return 0
