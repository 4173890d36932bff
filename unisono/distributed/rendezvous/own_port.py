"""Open a port of this process for other processes of the run, and name the addresses at which they may reach it."""

from __future__ import annotations

import socket

import psutil  # type: ignore[import-untyped]

from unisono import environment
from unisono.environment.routes import is_loopback


def listen(backlog: int, *, here: bool) -> socket.socket:
    """Return a socket that listens on this host only, or at all of its IPv4 and IPv6 addresses."""
    if here or not socket.has_dualstack_ipv6():
        return socket.create_server(("127.0.0.1" if here else "", 0), backlog=backlog)
    return socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)


def own_addresses() -> list[str]:
    """Return the addresses of this host: in the network that gloo uses, or in all of them, loopback last."""
    named = environment.variables(("GLOO_SOCKET_IFNAME",)).get("GLOO_SOCKET_IFNAME")
    networks = psutil.net_if_addrs()
    chosen = [networks[named]] if named in networks else networks.values()
    found = [a.address for of in chosen for a in of if a.family in (socket.AF_INET, socket.AF_INET6)]
    lasting = [address for address in found if "%" not in address]  # link-local: another name on each host
    return sorted(lasting, key=lambda address: (is_loopback(address), ":" in address))
