"""A rendezvous that cannot be reached: an error within the limit that names process, address, reason and next step."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from unisono.distributed.rendezvous import reachable
from unisono.distributed.rendezvous.reachable import Patience, reach, require_own_address
from unisono.environment import World
from unisono.environment.routes import interface_with, is_loopback, outer_interfaces, route_to
from unisono.errors import Problem, UnreachableHostError

SHORT = Patience(lookup=0.0, answer=0.5, start=1.0)


@pytest.fixture(autouse=True)
def short_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachable, "TRY_SECONDS", 0.2)
    monkeypatch.setattr(reachable, "RETRY_SECONDS", 0.1)


def at(host: str, port: int, *, rank: int = 3, local_size: int = 1) -> World:
    return World(rank=rank, size=4, local_size=local_size, host="here", store=f"hosted://{host}:{port}/job")


def refusal(world: World) -> Problem:
    with pytest.raises(UnreachableHostError) as caught:
        reach(world, SHORT)
    return caught.value.problems[0]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextmanager
def dropping_port() -> Iterator[int]:
    """Yield a port whose queue of connections is full: Linux drops all further packets to it, as a firewall does."""
    with ExitStack() as kept:
        server = kept.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        place = server.getsockname()
        for _ in range(10):
            client = kept.enter_context(socket.socket())
            client.settimeout(0.1)
            if client.connect_ex(place) not in (0, errno.EISCONN):
                break
        else:
            pytest.skip("this kernel accepts connections to a full queue")
        yield place[1]


def test_a_port_that_drops_packets_is_an_error_within_the_limit() -> None:
    with dropping_port() as port:
        start = time.monotonic()
        problem = refusal(at("127.0.0.1", port))
        assert time.monotonic() - start < 2.0
    assert problem.error == f"Process 3 cannot reach 127.0.0.1, port {port}, within 0.5 s."
    assert problem.facts.startswith("127.0.0.1: no answer (a firewall drops the packets, or no host has this address).")
    assert "MASTER_ADDR=" in problem.remedy
    assert f"open port {port} " in problem.remedy


def test_a_refused_connection_is_tried_for_longer_because_process_0_may_be_starting() -> None:
    port = free_port()
    start = time.monotonic()
    problem = refusal(at("127.0.0.1", port))
    assert 1.0 <= time.monotonic() - start < 3.0
    assert problem.error == f"Process 3 cannot reach 127.0.0.1, port {port}, within 1 s."
    assert problem.facts.startswith("127.0.0.1: connection refused ")
    assert "output of process 0" in problem.remedy


@pytest.mark.parametrize(("host", "family"), [("127.0.0.1", socket.AF_INET), ("[::1]", socket.AF_INET6)])
def test_a_port_that_opens_later_is_reached(host: str, family: socket.AddressFamily) -> None:
    if family == socket.AF_INET6 and interface_with("::1") is None:
        pytest.skip("this machine has no IPv6")
    with socket.socket(family) as server:
        server.bind((host.strip("[]"), 0))  # until it listens, connections to this port are refused
        timer = threading.Timer(0.3, server.listen)
        timer.start()
        reach(at(host, server.getsockname()[1]), Patience(answer=0.1, start=30.0))
        timer.join()


def test_a_name_of_another_host_that_resolves_to_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian writes `127.0.1.1 NAME` to /etc/hosts, and an image of a machine has it, too."""
    monkeypatch.setattr(reachable, "addresses_of", lambda host: ["127.0.1.1"])
    problem = refusal(at("node0", free_port()))
    assert problem.error.endswith("within 0.5 s.")
    assert problem.facts.startswith("On here, the name node0 resolves to loopback, so to this host itself. 127.0.1.1: ")
    assert problem.remedy == "export MASTER_ADDR=ADDRESS (of the host of process 0), or correct node0 in /etc/hosts."
    one_host = refusal(at("node0", free_port(), local_size=4))
    assert one_host.error.endswith("within 1 s.")


def test_process_0_must_be_found_at_its_own_address() -> None:
    port = free_port()
    for host in ("127.0.0.1", "localhost", *(each.address for each in outer_interfaces() if ":" not in each.address)):
        require_own_address(at(host, port, rank=0), SHORT)
    with pytest.raises(UnreachableHostError) as caught:
        require_own_address(at("192.0.2.77", port, rank=0), SHORT)  # RFC 5737: an address of no machine
    (problem,) = caught.value.problems
    assert problem.error == f"Process 0 cannot reach itself at 192.0.2.77, port {port}, within 0.5 s."
    assert "192.0.2.77 is no address of here" in problem.facts
    assert problem.remedy.startswith("export MASTER_ADDR=")


def test_an_address_that_leads_here_without_being_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the address of the host of a container whose port is published."""
    monkeypatch.setattr(reachable, "_is_own", lambda address: False)
    port = free_port()
    require_own_address(at("127.0.0.1", port, rank=0), SHORT)
    with socket.create_server(("127.0.0.1", port)):  # closed again: the store can be opened
        pass


def test_kubernetes_has_longer_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert Patience.here().answer == 60.0
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert Patience.here().answer == 300.0


def test_routes_and_interfaces() -> None:
    loopback = route_to("127.0.0.1")
    assert loopback is not None
    assert loopback == interface_with("127.0.0.1")
    assert str(loopback) == f"{loopback.name} (127.0.0.1)"
    assert [is_loopback(each) for each in ("127.0.1.1", "::1", "10.0.0.1", "fe80::1%eth0")] == [
        True,
        True,
        False,
        False,
    ]
    for each in outer_interfaces():
        assert not is_loopback(each.address)
        if ":" not in each.address:
            found = route_to(each.address)
            assert found is not None
            assert found.address == each.address
    assert interface_with("192.0.2.77") is None
