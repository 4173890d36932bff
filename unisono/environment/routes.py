"""Network interfaces of this host, and the route to an address. Nothing is sent."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from typing import NamedTuple

import psutil  # type: ignore[import-untyped]


class Interface(NamedTuple):
    """A network interface of this host, and its address there."""

    name: str
    address: str

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"


def is_loopback(address: str) -> bool:
    """Return whether an address, not a name, is one of the loopback interface: 127.0.0.1, 127.0.1.1, ::1."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def addresses_of(host: str) -> list[str]:
    """Return the addresses of a host name or an address, in the order in which they are tried. Raises OSError."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(place[4][0]) for place in found))


def route_to(address: str) -> Interface | None:
    """Return the interface by which packets to an address leave this host; None if there is no route.

    Nothing is sent: connecting a UDP socket only selects a route.
    """
    with contextlib.suppress(OSError):
        family, kind, protocol, _, place = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)
            return interface_with(str(probe.getsockname()[0]))
    return None


def interface_with(address: str) -> Interface | None:
    """Return the interface of this host that has an address; None if none has it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address.partition("%")[0] for each in addresses):
            return Interface(name, address)
    return None


def interface_named(name: str) -> Interface | None:
    """Return an interface by its name, with its first address; None if there is none."""
    return next((each for each in outer_interfaces() if each.name == name), None)


def outer_interfaces() -> list[Interface]:
    """Return the addresses of this host that others may reach: those that are neither loopback nor link-local."""
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.family in (socket.AF_INET, socket.AF_INET6):
                address = ipaddress.ip_address(each.address.partition("%")[0])
                if not (address.is_loopback or address.is_link_local):
                    found.append(Interface(name, each.address))
    return found
