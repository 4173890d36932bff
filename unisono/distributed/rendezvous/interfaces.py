"""Choose the network interface that leads to the other hosts of the run.

gloo announces the address that this host's own name resolves to. Where /etc/hosts gives the name a loopback address
(Debian: 127.0.1.1), or on a host with several networks, the others cannot reach that. The interface with the route to
the rendezvous is right, because the processes of all hosts have met there:

    rank 2   route to 10.0.0.1 leaves by 10.0.0.2, which eth1 has  --> eth1; writes to the store: "met at 10.0.0.1"
    rank 0   its name resolves to 127.0.1.1 here, so the route is loopback; reads that address, which its eth1 has
"""

from __future__ import annotations

import contextlib
import logging

import torch.distributed as dist

from unisono.distributed.rendezvous.connect import count_arrivals
from unisono.environment import World, host_of, join_port, set_for_libraries, variables
from unisono.environment.routes import Interface, addresses_of, interface_named, is_loopback, route_to

MET_AT = "met-at"
"""The key of the address at which a process on another host has found the store."""


def describe_network(world: World) -> str:
    """Return the interface for exchanges, and where the processes have met; "" for a run on one host."""
    at, given = host_of(world.store), variables(("GLOO_SOCKET_IFNAME",))
    if at is None or world.local_size == world.size or not given:
        return ""
    return f"network: {given['GLOO_SOCKET_IFNAME']}; the hosts meet at {join_port(*at)}"


def choose_interface(world: World, store: dist.Store) -> Interface | None:
    """Choose the interface of this host, and set it for gloo and NCCL unless the user has set one. Collective.

    Args:
        world: this process's place in the run.
        store: through which the processes find each other.

    Returns:
        The interface in use; None for a run on one host, if every process reaches the store by loopback, and if the
        user has set an interface that does not exist.
    """
    at = host_of(world.store)
    if at is None or world.local_size == world.size:
        return None
    chosen = None
    with contextlib.suppress(OSError):
        routes = {address: route_to(address) for address in addresses_of(at[0])}
        chosen = next((found for each, found in routes.items() if found and not is_loopback(each)), None)
        if chosen is not None:
            store.set(MET_AT, next(each for each, found in routes.items() if found == chosen))
    if not count_arrivals(store, world.size, "routes", chosen is not None):
        return None
    if chosen is None:
        chosen = route_to(store.get(MET_AT).decode())
    if chosen is None or is_loopback(chosen.address):
        return None
    set_for_libraries("GLOO_SOCKET_IFNAME", chosen.name)
    set_for_libraries("NCCL_SOCKET_IFNAME", f"={chosen.name}")  # "=": eth1 is not eth10
    (named,) = variables(("GLOO_SOCKET_IFNAME",)).values()
    used = chosen if named == chosen.name else interface_named(named)
    logging.getLogger("unisono").info("Process %s exchanges through %s.", world.rank, used or named)
    return used
