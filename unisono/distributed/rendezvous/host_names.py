"""Look up host names before torch does.

torch would try a name that does not resolve for half an hour, with a warning every second. gloo would use the loopback
address for a host whose own name does not resolve.
"""

from __future__ import annotations

import socket
import time

from unisono.environment import World, host_of, variables
from unisono.environment.routes import outer_interfaces
from unisono.errors import UnreachableHostError

RETRY_SECONDS = 0.5
"""Seconds between two lookups."""


def resolve_rendezvous_host(world: World, timeout: float) -> None:
    """Look up the host of the run's store, for `timeout` seconds.

    Raises:
        UnreachableHostError: the name does not resolve.
    """
    address = host_of(world.store)
    if address is None:
        return
    until = time.monotonic() + timeout
    host, port = address
    while (reason := resolution_error(host)) and time.monotonic() < until:
        time.sleep(RETRY_SECONDS)
    if not reason:
        return
    next_step = "export MASTER_ADDR=ADDRESS (the IP address of rank 0's host)."
    if world.store == "env://" and (host == world.host or world.local_size == world.size):
        next_step = f"torchrun --local-addr 127.0.0.1 ... (all processes on this host), or add {host} to /etc/hosts."
    raise UnreachableHostError(
        f"Process {world.rank} cannot connect to host {host}, port {port} (MASTER_ADDR).",
        f"The name {host} does not resolve on {world.host}: {reason} (tried for {timeout:g} s).",
        next_step,
    )


def require_own_host_name(world: World, backend: str) -> None:
    """Check that this host's name resolves where gloo announces its address to other hosts.

    GLOO_SOCKET_IFNAME names a network interface instead.

    Raises:
        UnreachableHostError: the run has several hosts, and the name of this one does not resolve.
    """
    several_hosts = world.local_size < world.size
    if backend != "gloo" or not several_hosts or variables(("GLOO_SOCKET_IFNAME",)):
        return
    if reason := resolution_error(world.host):
        raise UnreachableHostError(
            f"Process {world.rank} cannot connect to processes on other hosts.",
            f"The name of this host, {world.host}, does not resolve, so gloo has no address for it: {reason}.",
            f"export GLOO_SOCKET_IFNAME={interface()} (the network of these hosts), or add {world.host} to /etc/hosts.",
        )


def resolution_error(host: str) -> str:
    """Return the reason why this name does not resolve, or "" if it does."""
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        return error.strerror or str(error)
    except UnicodeError:  # a label that is empty or too long
        return "it is not a host name"
    return ""


def interface() -> str:
    """Return a network interface with an address that other hosts may reach, as an example; eth0 if there is none."""
    return next((each.name for each in outer_interfaces()), "eth0")
