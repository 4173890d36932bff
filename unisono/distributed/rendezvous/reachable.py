"""Try to reach the rendezvous with plain sockets before torch does, which would try for half an hour without a reason.

Process 3 cannot reach 10.0.0.1, port 29500, within 60 s.
  10.0.0.1: no answer (a firewall drops the packets, or no host has this address). Packets leave gpu2 by eth0 ...
  Next: ...
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import socket
import time
from dataclasses import dataclass

from unisono.environment import World, host_of, variables
from unisono.environment.routes import addresses_of, is_loopback, route_to
from unisono.errors import UnreachableHostError

TRY_SECONDS = 5.0
"""Time limit of one attempt to connect. Packets are repeated after 1 and 3 s, and Linux finds after 3 s that no machine
in this network has an address."""

RETRY_SECONDS = 0.5
"""Seconds between two attempts."""

REFUSED, SILENT, UNREACHABLE, NO_ROUTE = "connection refused", "no answer", "host unreachable", "no route"
EXPLAINED = {
    REFUSED: "connection refused (the host answers, and no process listens on the port)",
    SILENT: "no answer (a firewall drops the packets, or no host has this address)",
    UNREACHABLE: "host unreachable (no machine has this address, it is off, or a firewall rejects the packets)",
    NO_ROUTE: "no route (this host has no network that leads there)",
}


@dataclass(frozen=True)
class Patience:
    """Seconds after which attempts end.

    Attributes:
        lookup: while a name does not resolve; a name server may be busy.
        answer: while a host does not answer, or there is no route.
        start: while a host refuses the connection: process 0 is not there yet. All processes start together, but a
            file system from which a hundred of them import torch may be slow, and a script may prepare data first.
    """

    lookup: float = 5.0
    answer: float = 60.0
    start: float = 600.0

    @classmethod
    def here(cls) -> Patience:
        """Return the usual limits. In Kubernetes, names and hosts appear when pods start, at different times."""
        return cls(lookup=300.0, answer=300.0) if variables(("KUBERNETES_SERVICE_HOST",)) else cls()


def reach(world: World, patience: Patience) -> None:
    """Wait until the port of the run's store accepts a connection.

    Args:
        world: this process's place in the run, with a store that has a host and a port.
        patience: time limits.

    Raises:
        UnreachableHostError: it does not within the limit for the reason.
    """
    host, port = _place(world)
    start = time.monotonic()
    while True:
        reasons = obstacles(host, port)
        if "" in reasons.values():
            return
        starts = REFUSED in reasons.values() and not _is_misnamed(world, host, reasons)
        limit = patience.start if starts else patience.answer
        left = start + limit - time.monotonic()
        if left <= 0:
            break
        time.sleep(min(RETRY_SECONDS, left))
    raise UnreachableHostError(
        f"Process {world.rank} cannot reach {host}, port {port}, within {limit:g} s.",
        _facts(world, host, reasons),
        _remedy(world, host, port, reasons),
    )


def obstacles(host: str, port: int) -> dict[str, str]:
    """Try to connect to each address of a host. Return the reason for each that failed; "" for one that did not."""
    reasons: dict[str, str] = {}
    try:
        for address in addresses_of(host):
            reasons[address] = obstacle(address, port, TRY_SECONDS)
            if not reasons[address]:
                break
    except OSError as error:  # a name that resolved a moment ago
        reasons[host] = error.strerror or str(error)
    return reasons


def obstacle(address: str, port: int, timeout: float) -> str:
    """Try to connect once. Return the reason why that failed; "" if it did not."""
    try:
        socket.create_connection((address, port), timeout).close()
    except ConnectionRefusedError:
        return REFUSED
    except TimeoutError:
        return SILENT
    except OSError as error:
        if error.errno == errno.EHOSTUNREACH:
            return UNREACHABLE
        if error.errno in (errno.ENETUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL, errno.EINVAL):  # the last: blackhole
            return NO_ROUTE
        return error.strerror or str(error)
    return ""


def require_own_address(world: World, patience: Patience) -> None:
    """Check that process 0, which opens the port of the store, is found at its address.

    An address that no interface here has may still lead here, as that of a container's host or of a service does. So
    the port is opened for a moment, and a connection to the address must arrive there.

    Raises:
        UnreachableHostError: the address is that of another host, or of none.
    """
    host, port = _place(world)
    addresses = addresses_of(host)
    if any(_is_own(address) for address in addresses):
        return
    try:
        server = _listen(port)
    except OSError:  # the store reports that the port is in use
        return
    until = time.monotonic() + patience.answer
    with server:
        while True:
            if any(_leads_to(server, address, port) for address in addresses):
                return
            if time.monotonic() >= until:
                break
            time.sleep(RETRY_SECONDS)
    own = route_to(addresses[0])
    found = f"; {own} leads there" if own is not None else ""
    raise UnreachableHostError(
        f"Process {world.rank} cannot reach itself at {host}, port {port}, within {patience.answer:g} s.",
        f"Process 0 opens the port, and {' and '.join(addresses)} is no address of {world.host}{found}.",
        f"export MASTER_ADDR={own.address if own is not None else 'ADDRESS'} for all processes (an address of the host "
        "of process 0 that the others can reach).",
    )


def _listen(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _is_own(address: str) -> bool:
    """Return whether an interface of this host has an address: only then a socket can be bound to it."""
    with contextlib.suppress(OSError):
        family, kind, protocol, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(place)
            return True
    return False


def _leads_to(server: socket.socket, address: str, port: int) -> bool:
    """Return whether a connection to an address arrives at this server. Other processes may connect meanwhile."""
    token = secrets.token_bytes(16)
    with contextlib.suppress(OSError), socket.create_connection((address, port), TRY_SECONDS) as mine:
        mine.sendall(token)
        server.settimeout(TRY_SECONDS)
        while True:
            connection, _ = server.accept()
            connection.settimeout(TRY_SECONDS)
            with connection, contextlib.suppress(OSError):
                if connection.recv(len(token)) == token:
                    return True
    return False


def _place(world: World) -> tuple[str, int]:
    place = host_of(world.store)
    assert place is not None, world.store
    return place


def _is_misnamed(world: World, host: str, addresses: dict[str, str]) -> bool:
    """Return whether a name, other than localhost, resolves to this host itself, in a run with other hosts."""
    given = host in addresses or host == "localhost"
    return not given and world.local_size < world.size and all(is_loopback(address) for address in addresses)


def _facts(world: World, host: str, reasons: dict[str, str]) -> str:
    found = " ".join(describe_obstacle(world, address, reason) for address, reason in reasons.items())
    if _is_misnamed(world, host, reasons):
        return f"On {world.host}, the name {host} resolves to loopback, so to this host itself. {found}"
    return found


def describe_obstacle(world: World, address: str, reason: str) -> str:
    """Return sentences about an attempt that failed: its reason, and how packets leave this host."""
    route = route_to(address)
    by = f" Packets leave {world.host} by {route}." if route is not None and not is_loopback(route.address) else ""
    return f"{address}: {EXPLAINED.get(reason, reason)}.{by}"


def _remedy(world: World, host: str, port: int, reasons: dict[str, str]) -> str:
    """Return what to type for the first reason."""
    if _is_misnamed(world, host, reasons):
        return f"export MASTER_ADDR=ADDRESS (of the host of process 0), or correct {host} in /etc/hosts."
    (address, reason), *_ = reasons.items()
    other = "export MASTER_ADDR=ADDRESS (of the host of process 0, in a network that all hosts share)"
    if reason == REFUSED:
        return f"look at the output of process 0, which opens the port: has it started, or failed? Otherwise: {other}."
    if reason in (SILENT, UNREACHABLE):
        ports = f"open port {port} and ports 32768 to 60999 between these hosts"
        return f"ping {address}; if it answers, {ports}; if not, {other}."
    return f"ip route get {address}; or {other}."
