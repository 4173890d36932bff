"""A store that process 0 hosts, for processes that find each other by host, port and name, as under Slurm's srun.

    process 0   on host a: opens port p, writes the name there <--- process 1: connects, finds the name, continues
                                                               <--- process 2: the same

The port is derived from the name of a job (environment/addresses.py), so another program may use it. Then process 0
cannot open it and raises an error. A process that connects to the other program finds another name or none, and raises
an error, too, instead of mixing two runs.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from unisono.distributed.process_group import TIMEOUT
from unisono.distributed.rendezvous.host_names import resolve_rendezvous_host
from unisono.distributed.rendezvous.reachable import Patience, reach, require_own_address
from unisono.distributed.rendezvous.store_prefix import enter_round
from unisono.environment import World, host_of
from unisono.errors import WorldError

NAME_TIMEOUT = timedelta(seconds=30)
"""Process 0 writes the name immediately after it has opened the port."""

CONNECT_TIMEOUT = timedelta(minutes=10)
"""All tasks of a step start together, but a file system from which a hundred of them import torch may be slow."""


def host_store(world: World, patience: Patience, *, timeout: timedelta = NAME_TIMEOUT) -> dist.Store:
    """Return the store at hosted://host:port/name, which process 0 opens. Collective.

    A job may start several runs one after the other, with one name. Process 0 of an earlier run may still have its
    store open, so a process that loses the store before all have met there connects again.

    Args:
        world: this process's place in the run, with the address.
        patience: time limits for finding process 0.
        timeout: time limit for the name.

    Raises:
        WorldError: the port cannot be opened, or another program uses it.
        UnreachableHostError: the host's name does not resolve, or the host cannot be reached.
    """
    resolve_rendezvous_host(world, patience.lookup)
    if world.rank == 0:
        require_own_address(world, patience)
        return enter_round(_connect(world, timeout), 0, world.size, TIMEOUT)
    while True:
        reach(world, patience)
        store = _connect(world, timeout)
        with suppress(dist.DistNetworkError):
            return enter_round(store, world.rank, world.size, TIMEOUT)


def _connect(world: World, timeout: timedelta) -> dist.Store:
    """Open the store in process 0, or connect to it. Raises WorldError."""
    address, rank = world.store or "", world.rank
    host_and_port = host_of(address)
    assert host_and_port is not None, address
    (host, port), name = host_and_port, address.rpartition("/")[2]
    try:
        store: dist.Store = dist.TCPStore(
            host, port, is_master=rank == 0, timeout=CONNECT_TIMEOUT, wait_for_workers=False
        )
        if rank == 0:
            store.set(f"unisono-{name}", "here")
        store.wait([f"unisono-{name}"], timeout)
    except RuntimeError as error:
        fact = "That port cannot be opened" if rank == 0 else "Process 0 of this job does not answer there"
        raise WorldError(
            f"Process {rank} cannot connect to the run's store on host {host}, port {port}.",
            f"{fact}: {str(error).splitlines()[0]}",
            f"export MASTER_PORT={other_port(port)} for all processes (another port), or MASTER_ADDR=ADDRESS, if the "
            "launcher calls that host by a name of its own.",
        ) from None
    store.set_timeout(TIMEOUT)
    return dist.PrefixStore(name, store)


def other_port(port: int) -> int:
    """Return a port to try instead."""
    return port + 1 if port < 65_535 else port - 1
