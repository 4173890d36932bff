"""Hosts try each other before gloo does. (tests/network/test_hosts.py has a real firewall.)"""

from __future__ import annotations

import socket
import time

import torch.distributed as dist

from unisono.distributed.rendezvous import peer_check
from unisono.distributed.rendezvous.hosted_store import host_store
from unisono.distributed.rendezvous.interfaces import choose_interface
from unisono.distributed.rendezvous.peer_check import require_peers
from unisono.distributed.rendezvous.reachable import SILENT, Patience, obstacle
from unisono.environment import World, variables
from unisono.environment.routes import Interface, outer_interfaces
from unisono.errors import UnreachableHostError
from unisono.testing import run_ranks


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def outlive(world: World, store: dist.Store) -> None:
    """Keep process 0, which hosts the store, until the others need it no more."""
    store.add("ended", 1)
    while world.rank == 0 and store.add("ended", 0) < world.size:
        time.sleep(0.01)


def checked(world: World, port: int, deaf: int, address: str) -> str:
    """Check the peers as one host for each rank; rank `deaf` is reached by no other. Return the error."""
    here = World(rank=world.rank, size=world.size, local_size=1, store=f"hosted://127.0.0.1:{port}/a", host="here")
    store = host_store(here, Patience())
    own = Interface("lo", address)
    if deaf >= 0:
        place = f"peer-{deaf}"

        def blocked(address: str, port: int, timeout: float) -> str:
            at = store.get(place).decode()
            return SILENT if at == f"{address} {port}" and world.rank != deaf else obstacle(address, port, timeout)

        peer_check.obstacle = blocked
    try:
        require_peers(here, store, own, limit=0.2)
    except UnreachableHostError as error:
        return str(error)
    outlive(world, store)
    return ""


def test_hosts_that_reach_each_other() -> None:
    assert run_ranks(checked, 3, free_port(), -1, "127.0.0.1") == ["", "", ""]


def test_a_host_that_no_other_reaches_is_named_on_all_hosts() -> None:
    errors = run_ranks(checked, 2, free_port(), 1, "127.0.0.1")
    assert errors[0] == errors[1]
    first, facts, remedy = errors[0].splitlines()
    assert first.startswith("Process 0 cannot reach process 1 at 127.0.0.1, port ")
    assert first.endswith("within 0.2 s.")
    assert "no answer" in facts
    assert "GLOO_SOCKET_IFNAME" in remedy


def chosen(world: World, port: int, address: str) -> tuple[Interface | None, dict[str, str]]:
    here = World(rank=world.rank, size=world.size, local_size=1, store=f"hosted://{address}:{port}/a")
    store = host_store(here, Patience())
    found = choose_interface(here, store)
    outlive(world, store)
    return found, variables(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"))


def test_the_interface_with_the_route_is_set_for_libraries() -> None:
    for outer in outer_interfaces()[:1]:
        expected = (outer, {"GLOO_SOCKET_IFNAME": outer.name, "NCCL_SOCKET_IFNAME": f"={outer.name}"})
        assert run_ranks(chosen, 2, free_port(), outer.address) == [expected] * 2


def test_processes_that_all_meet_by_loopback_keep_the_default() -> None:
    assert run_ranks(chosen, 2, free_port(), "127.0.0.1") == [(None, {})] * 2
