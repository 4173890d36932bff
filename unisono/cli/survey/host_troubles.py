"""What is wrong with the hosts of a survey, and what to type."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from unisono.cli.benchmark.slow_links import MeasuredLink, findings
from unisono.cli.survey.host_survey import Survey, SurveyedHost, SurveyedLink
from unisono.errors import Problem
from unisono.launcher.hosts.host_differences import differences

CLOCK_SECONDS = 1.0
"""Difference of clocks that is worth a note. Logs and timelines of hosts are merged by time."""

RUN_DIR_BYTES = 2 * 2**30
MEMORY_BYTES = 2**30
ROOM = {"/dev/shm": 256 * 2**20}
"""Free bytes that other folders need; a temporary folder needs TEMPORARY_BYTES."""
TEMPORARY_BYTES = 2**24


class Trouble(NamedTuple):
    """Something that is wrong.

    Attributes:
        level: unreachable: a host cannot be examined; broken: a run cannot start; note: it is slow, or may fail.
        problem: what, with facts, and what to type.
    """

    level: str
    problem: Problem


def troubles_of(survey: Survey) -> list[Trouble]:
    """Return what is wrong, the most important first."""
    hosts = [host for host in survey.hosts if host.facts]
    found = [Trouble("unreachable", problem) for host in survey.hosts for problem in host.unreachable]
    for host in hosts:
        found += [Trouble("broken", problem) for problem in differences(host.name, host.facts, survey.here)]
    found += [Trouble("broken", problem) for problem in _broken_links(survey)]
    for host in hosts:
        found += [Trouble("note", problem) for problem in (*_room(host), *_clock(host, survey))]
    found += [Trouble("note", problem) for problem in slow_links(survey)]
    return found


def slow_links(survey: Survey) -> list[Problem]:
    """Return the slow links. Of the two directions of a link the worse one counts."""
    both: dict[tuple[int, int], MeasuredLink] = {}
    for link in survey.links:
        if not link.error:
            pair = (min(link.source, link.target), max(link.source, link.target))
            known = both.get(pair, MeasuredLink(pair, 0.0, float("inf")))
            latency = max(known.latency_seconds, link.latency_seconds)
            both[pair] = MeasuredLink(pair, latency, min(known.bytes_per_second, link.bytes_per_second))
    return findings(list(both.values()), [host.name for host in survey.hosts])


def _broken_links(survey: Survey) -> Iterator[Problem]:
    """Yield a problem for each host and reason, with all hosts that cannot connect to it."""
    failed: dict[tuple[int, str, str], list[SurveyedLink]] = {}
    for link in survey.links:
        if link.error:
            failed.setdefault((link.target, link.error, link.other_address), []).append(link)
    for (target, error, other), links in failed.items():
        host = survey.hosts[target]
        names = [survey.hosts[link.source].name for link in links]
        sources = " and ".join(names)
        at = f"{links[0].address}{f' ({host.interface} of {host.name})' if host.interface else ''}"
        headline = f"Host{'s' * (len(names) > 1)} {sources} cannot connect to host {host.name}."
        if other:
            interface = SurveyedHost(host.name, host.facts, other, None).interface
            facts = f"At {at}: {error}. At {other} ({interface}) it can be reached."
            do = f"HostName {other} for {host.name} in ~/.ssh/config: processes use the interface of ssh's connection"
        else:
            facts = f"At {at}: {error}. ssh works, but gradients travel directly between hosts, to free ports."
            do = f"let the firewall of {host.name} accept TCP from {sources} at all ports from 1024"
        yield Problem(headline, facts, do)


def _room(host: SurveyedHost) -> Iterator[Problem]:
    """Yield a problem for each folder, and for the memory, with too little room."""
    free = host.facts["free_bytes"]
    if free is not None and free < RUN_DIR_BYTES:
        do = "free space there, or --run-dir DIR on another file system"
        yield Problem(f"Host {host.name} has little space for runs.", f"{_size(free)} are free.", do)
    for folder, there in host.facts.get("free_elsewhere", {}).items():
        if there is not None and there < ROOM.get(folder, TEMPORARY_BYTES):
            shared = "free space there (mount -o remount,size=1G /dev/shm); containers: --shm-size=1g"
            do = shared if folder in ROOM else f"ssh {host.name} df -h {folder}, and free space there"
            yield Problem(f"Host {host.name} has little space in {folder}.", f"{_size(there)} are free.", do)
    if host.facts["memory"] < MEMORY_BYTES:
        do = f"ssh {host.name} top -o %MEM, and end what is not needed"
        facts = f"{_size(host.facts['memory'])} are available."
        yield Problem(f"Host {host.name} has little memory.", facts, do)


def _clock(host: SurveyedHost, survey: Survey) -> Iterator[Problem]:
    if host.clock is None or abs(host.clock.offset_seconds) - host.clock.error_seconds < CLOCK_SECONDS:
        return
    offset = host.clock.offset_seconds
    facts = (
        f"It is {abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} that of {survey.here['host']}, by which"
    )
    facts += " logs and timelines would be merged in a wrong order."
    do = f"ssh {host.name} timedatectl set-ntp true, or: chronyc makestep"
    yield Problem(f"The clock of host {host.name} is wrong.", facts, do)


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GB" if count >= 2**30 else f"{count / 2**20:.0f} MB"
