"""A meeting place in process 0, for processes that find each other by a host, a port and a name: those of Slurm's srun.

    process 0   on host a: opens port p, writes the name there <--- process 1: connects, looks for the name, goes on
                                                               <--- process 2: the same

A port follows from the number of a job (environment.py), so it may be somebody else's. Then process 0 cannot open it,
and says so; and whoever connects to it finds another name, or none, and says so as well, instead of mixing two runs.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from unisono.distributed.membership.waiting import TIMEOUT
from unisono.distributed.rendezvous.host_names import unresolved
from unisono.environment import host_of
from unisono.errors import UnreachableHostError, WorldError

HOSTED = "hosted://"

NAMED = timedelta(seconds=30)
"""Process 0 writes the name in the moment after it has opened the port."""

ARRIVES = timedelta(minutes=10)
"""All tasks of a step start together; but a file system in which a hundred of them import torch may be slow."""


def host_store(place: str, rank: int, *, patience: timedelta = NAMED) -> dist.Store:
    """The store at `place`, hosted://host:port/name, which process 0 opens. Raises WorldError."""
    at = host_of(place)
    assert at is not None, place
    (host, port), name = at, place.rpartition("/")[2]
    asked = f"Process {rank} was to meet the others on host {host}, port {port}."
    another = f"export MASTER_PORT={other(port)} in the job's script (another port)"
    do = f"{another}, or MASTER_ADDR=ADDRESS, if Slurm calls that host by a name of its own."
    if reason := unresolved(host):
        do = "export MASTER_ADDR=ADDRESS in the job's script: that of the step's first host, where process 0 is."
        raise UnreachableHostError(asked, f"There is no host {host} for this one: {reason}.", do)
    try:
        store: dist.Store = dist.TCPStore(host, port, is_master=rank == 0, timeout=ARRIVES, wait_for_workers=False)
        if rank == 0:
            store.set(f"unisono-{name}", "here")
        store.wait([f"unisono-{name}"], patience)
    except RuntimeError as error:
        what = "That port cannot be opened" if rank == 0 else "Process 0 of this job does not answer there"
        raise WorldError(asked, f"{what}: {str(error).splitlines()[0]}", do) from None
    store.set_timeout(TIMEOUT)
    return dist.PrefixStore(name, store)


def other(port: int) -> int:
    """A port to try instead."""
    return port + 1 if port < 65_535 else port - 1
