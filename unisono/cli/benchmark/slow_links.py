"""Find slow links by comparing links of the same kind, within hosts and between hosts, with each other.

First whole processes: one whose best link is much worse than the best links of the others is slow with all of them, and
its links are not considered further. Then the links of the other processes are compared with their median.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import NamedTuple

from unisono.cli.benchmark.units import bandwidth, duration
from unisono.errors import Problem

SLOW = 0.5
"""Fraction of the median bandwidth, below which a link is slow."""

LATE = 3.0
"""Multiple of the median latency, above which a link is slow if it is also LATE_SECONDS longer."""
LATE_SECONDS = 100e-6

GRADIENTS = 100e6
"""Bytes in an example of what a slow link costs."""


class MeasuredLink(NamedTuple):
    """A link between two processes: half the round trip of a small message, and the bandwidth of a large one."""

    ranks: tuple[int, ...]
    latency_seconds: float
    bytes_per_second: float


def findings(links: Sequence[MeasuredLink], hosts: Sequence[str]) -> list[Problem]:
    """Return what is much slower than the rest. At least three links of a kind are needed.

    Args:
        links: the links of all pairs.
        hosts: the host of each rank. Links between three hosts or more are compared by hosts.
    """
    within = [link for link in links if len({hosts[rank] for rank in link.ranks}) == 1]
    between = [link for link in links if link not in within]
    names = list(dict.fromkeys(hosts))
    by_host = _by_host(between, [names.index(host) for host in hosts])
    kinds = [(within, hosts, _rank), (between, hosts, _rank)]
    if len(by_host) >= 3:
        kinds[1] = (by_host, names, lambda number: f"host {names[number]}")
    return [found for some, where, name in kinds if len(some) >= 3 for found in _of_a_kind(some, where, name)]


def _rank(number: int) -> str:
    return f"rank {number}"


def _by_host(links: Sequence[MeasuredLink], host_of: Sequence[int]) -> list[MeasuredLink]:
    """Return a link for each pair of hosts: the best figures of their processes."""
    found: dict[tuple[int, ...], list[MeasuredLink]] = {}
    for link in links:
        found.setdefault(tuple(sorted(host_of[rank] for rank in link.ranks)), []).append(link)
    return [_best(some)._replace(ranks=pair) for pair, some in found.items()]


def _of_a_kind(links: Sequence[MeasuredLink], hosts: Sequence[str], name: Callable[[int], str]) -> Iterator[Problem]:
    """Yield the slow ends, then the slow links. `name` names an end of a link."""
    ranks = sorted({rank for link in links for rank in link.ranks})
    best = {rank: _best([link for link in links if rank in link.ranks]) for rank in ranks}
    slow = [rank for rank in ranks if _odd(best[rank], list(best.values()))]
    usual = median(each.bytes_per_second for each in best.values())
    for rank in slow:
        true = f"Its best link has {_odd(best[rank], list(best.values()))} of the {len(ranks)} best links."
        peer = next(other for link in links if rank in link.ranks for other in link.ranks if other != rank)
        error = f"{name(rank)[:1].upper()}{name(rank)[1:]} is slow with all others."
        yield Problem(error, true + _cost(best[rank], usual), _what_to_do(hosts[rank], hosts[peer]))
    others = [link for link in links if not set(link.ranks) & set(slow)]
    for link in others if len(others) >= 3 else ():
        if found := _odd(link, others):
            one, other = link.ranks
            usual = median(each.bytes_per_second for each in others)
            facts = f"It has {found} of {len(others)} links.{_cost(link, usual)}"
            error = f"The link between {name(one)} and {name(other)} is slow."
            yield Problem(error, facts, _what_to_do(hosts[one], hosts[other]))


def _cost(link: MeasuredLink, usual: float) -> str:
    """Return what a slow link means for the exchange of a step; "" if only its latency is long."""
    if link.bytes_per_second >= SLOW * usual:
        return ""
    slow, fast = (duration(GRADIENTS / speed) for speed in (link.bytes_per_second, usual))
    return f" Each exchange waits for its slowest link: 100 MB over it take {slow}, and {fast} at the median."


def _best(links: Sequence[MeasuredLink]) -> MeasuredLink:
    """Return the best latency and the best bandwidth of several links."""
    return MeasuredLink((), min(link.latency_seconds for link in links), max(link.bytes_per_second for link in links))


def _odd(link: MeasuredLink, all_: Sequence[MeasuredLink]) -> str:
    """Return in which respect a link is much worse than the median of all; "" if it is not."""
    wide, short = median(each.bytes_per_second for each in all_), median(each.latency_seconds for each in all_)
    slower = []
    if link.bytes_per_second < SLOW * wide:
        ratio = link.bytes_per_second / wide
        slower.append(f"{bandwidth(link.bytes_per_second)}, {ratio:.2g} times the median ({bandwidth(wide)})")
    if link.latency_seconds > max(LATE * short, short + LATE_SECONDS):
        took, usual = duration(link.latency_seconds), duration(short)
        slower.append(f"{took} for a small message, {link.latency_seconds / short:.2g} times the median ({usual})")
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
