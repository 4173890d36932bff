"""Find slow links by comparing links of the same kind, within hosts and between hosts, with each other.

First whole processes: one whose best link is much worse than the best links of the others is slow with all of them, and
its links are not considered further. Then the links of the other processes are compared with their median.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from unisono.cli.benchmark.units import bandwidth, duration
from unisono.errors import Problem

SLOW = 0.5
"""Fraction of the median bandwidth, below which a link is slow."""

LATE = 3.0
"""Multiple of the median latency, above which a link is slow if it is also LATE_SECONDS longer."""
LATE_SECONDS = 100e-6


class MeasuredLink(NamedTuple):
    """A link between two processes: half the round trip of a small message, and the bandwidth of a large one."""

    ranks: tuple[int, ...]
    latency_seconds: float
    bytes_per_second: float


def findings(links: Sequence[MeasuredLink], hosts: Sequence[str]) -> list[Problem]:
    """Return what is much slower than the rest. `hosts` has one entry per rank. At least three links are needed."""
    within = [link for link in links if len({hosts[rank] for rank in link.ranks}) == 1]
    between = [link for link in links if link not in within]
    return [found for some in (within, between) if len(some) >= 3 for found in _of_a_kind(some, hosts)]


def _of_a_kind(links: Sequence[MeasuredLink], hosts: Sequence[str]) -> Iterator[Problem]:
    ranks = sorted({rank for link in links for rank in link.ranks})
    best = {rank: _best([link for link in links if rank in link.ranks]) for rank in ranks}
    slow = [rank for rank in ranks if _odd(best[rank], list(best.values()))]
    for rank in slow:
        true = f"Its best link has {_odd(best[rank], list(best.values()))} of the {len(ranks)} processes."
        peer = next(other for link in links if rank in link.ranks for other in link.ranks if other != rank)
        yield Problem(f"Rank {rank} is slow with all other ranks.", true, _what_to_do(hosts[rank], hosts[peer]))
    others = [link for link in links if not set(link.ranks) & set(slow)]
    for link in others if len(others) >= 3 else ():
        if found := _odd(link, others):
            one, other = link.ranks
            true = f"It has {found} of {len(others)} links."
            yield Problem(
                f"The link between ranks {one} and {other} is slow.", true, _what_to_do(hosts[one], hosts[other])
            )


def _best(links: Sequence[MeasuredLink]) -> MeasuredLink:
    """Return the best latency and the best bandwidth of several links."""
    return MeasuredLink((), min(link.latency_seconds for link in links), max(link.bytes_per_second for link in links))


def _odd(link: MeasuredLink, all_: Sequence[MeasuredLink]) -> str:
    """Return in which respect a link is much worse than the median of all; "" if it is not."""
    wide, short = median(each.bytes_per_second for each in all_), median(each.latency_seconds for each in all_)
    slower = []
    if link.bytes_per_second < SLOW * wide:
        slower.append(f"{bandwidth(link.bytes_per_second)}, where {bandwidth(wide)} is the median")
    if link.latency_seconds > max(LATE * short, short + LATE_SECONDS):
        took, usual = duration(link.latency_seconds), duration(short)
        slower.append(f"{took} for a small message, where {usual} is the median")
    return ", and ".join(slower)


def _what_to_do(one: str, other: str) -> str:
    if one == other:
        return (
            f"check what else runs on {one} (top), and whether processes are on different sockets (lscpu, taskset -p "
            "PID); then measure again, because a short disturbance is enough."
        )
    return (
        f"measure the network (iperf3 -s on {one}, iperf3 -c {one} on {other}), check its speed (ethtool DEVICE) "
        "and its errors (ip -s link); with several networks, select the fast one: GLOO_SOCKET_IFNAME=DEVICE."
    )
