"""Host names, looked up before torch does: it would look for one that does not resolve for half an hour, with a warning
a second, and gloo takes the loopback address for a host whose own name does not resolve.
"""

from __future__ import annotations

import socket
import time

import psutil  # type: ignore[import-untyped]

from unisono.environment import World, host_of, variables
from unisono.errors import UnreachableHostError

PATIENCE_SECONDS = 5.0
"""A name server that is busy answers within this time."""

PATIENCE_IN_A_CLUSTER_SECONDS = 300.0
"""In Kubernetes the name of a pod resolves once the pod is there: each may be started at another time."""

AGAIN_SECONDS = 0.5
"""Between two lookups."""


def resolve_rendezvous_host(world: World, patience: float | None = None) -> None:
    """Look up the host that MASTER_ADDR names, for so many seconds. Raises Unreachable if it does not resolve."""
    at = host_of(world.store)
    if world.store != "env://" or at is None:
        return
    if patience is None:
        in_a_cluster = bool(variables(("KUBERNETES_SERVICE_HOST",)))
        patience = PATIENCE_IN_A_CLUSTER_SECONDS if in_a_cluster else PATIENCE_SECONDS
    until = time.monotonic() + patience
    while (reason := unresolved(at[0])) and time.monotonic() < until:
        time.sleep(AGAIN_SECONDS)
    if not reason:
        return
    asked = f"Process {world.rank} was to meet the other {world.size - 1} on host {at[0]}, port {at[1]} (MASTER_ADDR)."
    true = f"The name {at[0]} does not resolve on {world.host}: {reason}."
    do = "export MASTER_ADDR=ADDRESS (the IP address of rank 0's host)."
    if at[0] == world.host or world.local_size == world.size:
        do = f"torchrun --local-addr 127.0.0.1 ... (all processes on this host), or add {at[0]} to /etc/hosts."
    raise UnreachableHostError(asked, true, do)


def require_own_host_name(world: World, backend: str) -> None:
    """gloo tells other hosts the address that this host's own name resolves to. Raises Unreachable if there are other
    hosts, and none: GLOO_SOCKET_IFNAME names a network interface instead."""
    several = world.local_size < world.size
    if backend != "gloo" or not several or variables(("GLOO_SOCKET_IFNAME",)):
        return
    if reason := unresolved(world.host):
        raise UnreachableHostError(
            f"Process {world.rank} was to connect to the other {world.size - 1}, some of which are on other hosts.",
            f"The name of this host, {world.host}, does not resolve, so gloo has no address for it: {reason}.",
            f"export GLOO_SOCKET_IFNAME={interface()} (the network of these hosts), or add {world.host} to /etc/hosts.",
        )


def unresolved(host: str) -> str:
    """Why this name does not resolve; "": it does."""
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        return error.strerror or str(error)
    except UnicodeError:  # a label that is empty or too long
        return "it is no host name"
    return ""


def interface() -> str:
    """A network interface with an address that other hosts may reach, for an example; eth0 if there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.family == socket.AF_INET and not a.address.startswith("127.") for a in addresses):
            return name
    return "eth0"
