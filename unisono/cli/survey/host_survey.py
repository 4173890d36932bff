"""Examine hosts from one of them, through the agents that a run uses: facts, clocks, and the links between all pairs.

launcher ══ ssh ══▶ agent on a ──── plain TCP: latency, bandwidth ────▶ agent on b
         ══ ssh ══▶ agent on b
"""

from __future__ import annotations

import contextlib
import ipaddress
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from unisono.cli.benchmark.pair_rounds import tournament
from unisono.errors import Problem
from unisono.launcher.hosts.cluster import Connector
from unisono.launcher.hosts.host_differences import CONNECT_SECONDS, why_unreachable
from unisono.launcher.hosts.host_facts import facts_of
from unisono.launcher.hosts.host_list import ListedHost
from unisono.launcher.hosts.remote_host import Link, RemoteHost
from unisono.launcher.hosts.ssh import AGENT, SshLink

CLOCK_TRIPS = 8
"""Questions about a clock. The quickest one counts, because its error is smallest (RFC 5905, section 8)."""

ASK_SECONDS = 60.0
"""Time limit for an answer of an agent."""


class HostClock(NamedTuple):
    """Seconds by which a host's clock is ahead of this one's, and the largest error."""

    offset_seconds: float
    error_seconds: float


class SurveyedHost(NamedTuple):
    """A host.

    Attributes:
        name: as the user gave it.
        facts: see host_facts.py; {} if it cannot be reached.
        address: at which the processes of other hosts connect to it; "" if it is not known.
        clock: of this host; None if it was not compared.
        unreachable: why it cannot be examined; () if it was.
    """

    name: str
    facts: Mapping[str, Any]
    address: str
    clock: HostClock | None
    unreachable: tuple[Problem, ...] = ()

    @property
    def interface(self) -> str:
        """The network interface that has the address; "" if none has it."""
        found = self.facts.get("interfaces", {}).items()
        return next((name for name, addresses in found if self.address in addresses), "")


class SurveyedLink(NamedTuple):
    """The link from one host to another one.

    Attributes:
        source: the place in the list of the host that connects.
        target: that of the other host.
        address: the address of the target.
        latency_seconds: half of a round trip.
        bytes_per_second: the bandwidth.
        error: why there is none; "" if there is one.
        other_address: another address of the target that can be reached, where `address` cannot; "" if none is known.
    """

    source: int
    target: int
    address: str
    latency_seconds: float = 0.0
    bytes_per_second: float = 0.0
    error: str = ""
    other_address: str = ""


class Survey(NamedTuple):
    """What was found: the facts of this host, with which others are compared, all hosts, and the links of all pairs."""

    here: Mapping[str, Any]
    hosts: Sequence[SurveyedHost]
    links: Sequence[SurveyedLink]


def _refuse(number: int, link: Link) -> None:
    """End the connection of a host that was lost and comes back: the survey has gone past it."""
    link.kill()


def examine_hosts(listed: Sequence[ListedHost], connector: Connector, script: Path | None, run_dir: Path) -> Survey:
    """Examine the hosts of a list.

    Args:
        listed: the hosts.
        connector: connects to their agents.
        script: the script that must be the same on all; None: none.
        run_dir: the folder for runs, which all must see. It need not exist.
    """
    with ExitStack() as stack:
        about = stack.enter_context(marked(script, run_dir))
        others = {number: host for number, host in enumerate(listed) if not host.is_here}
        links: dict[int, Link] = dict(stack.enter_context(connector.connect(others, _refuse)))
        for number, host in enumerate(listed):
            if host.is_here:
                links[number] = SshLink([sys.executable, "-u", "-P", "-m", AGENT])
        store = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="unisono-doctor-"))) / "store"
        remote = [RemoteHost(host.name, links[number], store, _say_nothing) for number, host in enumerate(listed)]
        for agent in remote:
            stack.callback(agent.close, 0)
            agent.open(**about)
        with ThreadPoolExecutor(len(remote)) as pool:
            list(pool.map(lambda agent: agent.wait_for_facts(CONNECT_SECONDS), remote))
            here = facts_of(**about)
            addresses = [
                address if _answers(agent, here) else ""
                for address, agent in zip(_addresses(listed, remote), remote, strict=True)
            ]
            clocks = list(pool.map(lambda agent: _clock_of(agent) if _answers(agent, here) else None, remote))
            found = _links(remote, addresses, pool)
        hosts = [
            SurveyedHost(
                agent.name, agent.facts or {}, address, clock, () if agent.facts else (why_unreachable(agent),)
            )
            for agent, address, clock in zip(remote, addresses, clocks, strict=True)
        ]
        return Survey(here, hosts, found)


@contextlib.contextmanager
def marked(script: Path | None, run_dir: Path) -> Iterator[dict[str, str]]:
    """Create a file that other hosts must see. Yield the arguments of host_facts.facts_of."""
    folder = next(each for each in (run_dir.resolve(), *run_dir.resolve().parents) if each.is_dir())
    mark = folder / f".reachable-{uuid.uuid4().hex[:8]}"
    mark.touch()
    try:
        path = str(script.resolve()) if script is not None else ""
        yield {"script": path, "run_dir": str(folder), "mark": mark.name}
    finally:
        mark.unlink(missing_ok=True)


def outer_addresses(facts: Mapping[str, Any]) -> list[str]:
    """Return the addresses of a host that others may reach: those that are neither loopback nor link-local."""
    found = [address for addresses in facts.get("interfaces", {}).values() for address in addresses]
    parsed = {address: ipaddress.ip_address(address) for address in found}
    return [address for address, each in parsed.items() if not (each.is_loopback or each.is_link_local)]


def _say_nothing(text: str) -> None:
    """Discard a line about a lost host: the survey reports it."""


def _addresses(listed: Sequence[ListedHost], remote: Sequence[RemoteHost]) -> list[str]:
    """Return the address of each host: that of ssh's connection, which the processes of a run use as well."""
    routes = [(agent.facts or {}).get("reached_at") for agent in remote]
    own = next((route[0] for host, route in zip(listed, routes, strict=True) if route and not host.is_here), "")
    return [own if host.is_here else route[1] if route else "" for host, route in zip(listed, routes, strict=True)]


def _answers(agent: RemoteHost, here: Mapping[str, Any]) -> bool:
    """Return whether a host's agent answers questions: another version of Unisono may not understand them."""
    return agent.facts is not None and agent.facts["unisono"] == here["unisono"]


def _clock_of(agent: RemoteHost) -> HostClock | None:
    trips: list[tuple[float, float]] = []
    for _ in range(CLOCK_TRIPS):
        sent, began = time.time(), time.perf_counter()
        there = agent.ask(ASK_SECONDS, clock=True).get("time")
        took = time.perf_counter() - began
        if there is None:
            break
        trips.append((took / 2, float(there) - (sent + took / 2)))
    return HostClock(min(trips)[1], min(trips)[0]) if trips else None


def _links(remote: Sequence[RemoteHost], addresses: Sequence[str], pool: ThreadPoolExecutor) -> list[SurveyedLink]:
    """Measure all links in rounds of disjoint pairs, so that they do not disturb each other."""
    probes = list(pool.map(_listen, remote, addresses))

    def measure(pair: tuple[int, int]) -> list[SurveyedLink]:
        return [
            _measured(remote, source, target, addresses[target], probes[target])
            for source, target in (pair, pair[::-1])
            if addresses[source] and addresses[target]
        ]

    return sorted(link for turn in tournament(len(remote)) for links in pool.map(measure, turn) for link in links)


def _listen(agent: RemoteHost, address: str) -> dict[str, Any]:
    if not agent.facts or not address:
        return {"error": "its address is not known"}
    return agent.ask(ASK_SECONDS, listen=address)


def _measured(
    remote: Sequence[RemoteHost], source: int, target: int, address: str, listening: Mapping[str, Any]
) -> SurveyedLink:
    """Measure one link. Where it fails, try the other addresses of the target."""
    if "error" in listening:
        return SurveyedLink(source, target, address, error=str(listening["error"]))
    found = _ask_probe(remote[source], address, listening)
    if "error" not in found:
        return SurveyedLink(source, target, address, found["latency_seconds"], found["bytes_per_second"])
    for other in outer_addresses(remote[target].facts or {}):
        if other != address:
            there = _listen(remote[target], other)
            if "error" not in there and "error" not in _ask_probe(remote[source], other, there):
                return SurveyedLink(source, target, address, error=str(found["error"]), other_address=other)
    return SurveyedLink(source, target, address, error=str(found["error"]))


def _ask_probe(agent: RemoteHost, address: str, listening: Mapping[str, Any]) -> dict[str, Any]:
    return agent.ask(ASK_SECONDS, probe=[address, listening["port"], listening["token"]])
