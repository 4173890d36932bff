"""Which link is slow? A pair of processes is compared with all the others, since nobody knows what a link should do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from unisono.cli.quantities import bandwidth, duration
from unisono.errors import Problem

SLOW = 0.5
"""A link with less than this part of the median bandwidth is told."""

LATE = 3.0
"""One with more than so many times the median latency, too; if that is more than LATE_SECONDS longer."""
LATE_SECONDS = 100e-6


class Link(NamedTuple):
    """Between two processes: a small message's way (half a round trip), and a large one's bytes a second."""

    ranks: tuple[int, ...]
    latency_seconds: float
    bytes_per_second: float


def findings(links: Sequence[Link], hosts: Sequence[str]) -> list[Problem]:
    """Links that are much slower than the others, in words; `hosts`: of each rank. Two links cannot tell which of them
    is the odd one."""
    if len(links) < 3:
        return []
    wide, short = median(link.bytes_per_second for link in links), median(link.latency_seconds for link in links)
    found = []
    for link in links:
        slow = link.bytes_per_second < SLOW * wide
        late = link.latency_seconds > max(LATE * short, short + LATE_SECONDS)
        if slow or late:
            found.append((link, slow, late))
    shared = _shared([link for link, _, _ in found])
    told = []
    for link, slow, late in found:
        one, other = link.ranks
        true = []
        if slow:
            true.append(f"{bandwidth(link.bytes_per_second)}, where the median of {len(links)} is {bandwidth(wide)}")
        if late:
            true.append(f"{duration(link.latency_seconds)} for a small message, where the median is {duration(short)}")
        more = f" Rank {shared} is in all {len(found)} slow links." if shared is not None else ""
        do = _on_one_host(hosts[one]) if hosts[one] == hosts[other] else _between(hosts[one], hosts[other])
        asked = f"The link between ranks {one} and {other} is slow."
        told.append(Problem(asked, f"{'; '.join(true)}.{more}", do))
    return told


def _shared(links: Sequence[Link]) -> int | None:
    """The one process that is in all of several slow links."""
    counts = Counter(rank for link in links for rank in link.ranks)
    ranks = [rank for rank, count in counts.items() if count == len(links) > 1]
    return ranks[0] if len(ranks) == 1 else None


def _on_one_host(host: str) -> str:
    return (
        f"look at what else runs on {host} (top) and whether they are on different sockets (lscpu, taskset -p PID); "
        "then measure again, since a noisy moment is enough."
    )


def _between(one: str, other: str) -> str:
    return (
        f"measure the line itself (iperf3 -s on {one}, iperf3 -c {one} on {other}), look at its speed (ethtool DEVICE) "
        "and its errors (ip -s link); on several networks name the fast one: GLOO_SOCKET_IFNAME=DEVICE."
    )
