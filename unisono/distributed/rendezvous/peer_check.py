"""Check that hosts reach each other at any port, before gloo or NCCL tries: a firewall may open only the rendezvous.

    host 0   listens at 10.0.0.1:41234, writes that to the store <---.   every host connects to every other one;
    host 1   listens at 10.0.0.2:35511, writes that to the store <---'   the operating system accepts by itself

gloo would try for minutes, and its error does not name the address.
"""

from __future__ import annotations

import socket
import time

import torch.distributed as dist

from unisono.distributed.rendezvous.connect import count_arrivals
from unisono.distributed.rendezvous.reachable import RETRY_SECONDS, TRY_SECONDS, describe_obstacle, obstacle
from unisono.environment import World, host_of
from unisono.environment.routes import Interface
from unisono.errors import UnreachableHostError

LIMIT_SECONDS = 20.0
"""Time limit for a host. All processes have started, so only lost packets take time."""

READ_SECONDS = 5.0
"""Time limit for processes that read why the start fails."""

FAILURE = "unreached"
"""The key of the error of a process that does not reach another one."""


def require_peers(world: World, store: dist.Store, own: Interface | None, limit: float = LIMIT_SECONDS) -> None:
    """Connect once to each other host of the run, from the first process of this one. Collective.

    Args:
        world: this process's place in the run.
        store: through which the processes find each other.
        own: the interface for exchanges on this host; None: it is unknown, and other hosts do not try it.
        limit: time limit for each host, in seconds.

    Raises:
        UnreachableHostError: a process does not reach another one. The error is the same on all hosts.
    """
    if host_of(world.store) is None or world.local_size == world.size:
        return
    family = socket.AF_INET6 if own is not None and ":" in own.address else socket.AF_INET
    leads = world.local_rank == 0  # every process, if the launcher sets no local ranks
    with socket.socket(family, socket.SOCK_STREAM) as server:
        place = ""
        if leads and own is not None:
            server.bind(socket.getaddrinfo(own.address, 0, family, socket.SOCK_STREAM)[0][4])
            server.listen(max(world.size, 128))
            place = f"{own.address} {server.getsockname()[1]}"
        store.set(f"peer-{world.rank}", place)
        count_arrivals(store, world.size, "peers")
        error = _first_obstacle(world, store, limit) if leads else ""
        if error:
            store.set(FAILURE, error)
        reached = count_arrivals(store, world.size, "peers-reached", not error)  # the server stays open until then
    if reached < world.size:
        first, facts, remedy = store.get(FAILURE).decode().split("\n")
        _wait_for_readers(world, store)
        raise UnreachableHostError(first, facts, remedy)


def _wait_for_readers(world: World, store: dist.Store) -> None:
    """Wait in process 0, which may host the store, until all others have read the error."""
    until = time.monotonic() + READ_SECONDS
    read = store.add("peers-read", 1)
    while world.rank == 0 and read < world.size and time.monotonic() < until:
        time.sleep(0.01)
        read = store.add("peers-read", 0)


def _first_obstacle(world: World, store: dist.Store, limit: float) -> str:
    """Try all other hosts. Return the three lines of the error about the first that is not reached; "" if all are."""
    for other in range(world.size):
        place = store.get(f"peer-{other}").decode()
        if not place or other == world.rank:
            continue
        address, _, port = place.rpartition(" ")
        until = time.monotonic() + limit
        while reason := obstacle(address, int(port), TRY_SECONDS):
            if time.monotonic() >= until:
                return "\n".join(_error(world, other, address, port, limit, reason))
            time.sleep(RETRY_SECONDS)
    return ""


def _error(world: World, other: int, address: str, port: str, limit: float, reason: str) -> tuple[str, str, str]:
    """Return error, facts and remedy."""
    return (
        f"Process {world.rank} cannot reach process {other} at {address}, port {port}, within {limit:g} s.",
        f"{describe_obstacle(world, address, reason)} The rendezvous is reachable; exchanges use other ports.",
        "open all TCP ports between these hosts (those of `sysctl net.ipv4.ip_local_port_range`), or name a network "
        "that all hosts share: export GLOO_SOCKET_IFNAME=eth1",
    )
