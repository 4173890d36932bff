"""The rates of the links of hosts, measured when a run starts: a host with a slow link owns less of the gradient.

One process of each host, its leader, sends a marker and two messages to the leaders of the next two hosts. The leader
that receives them measures the time between one arrival and the next, and the longer time counts: latency and a late
sender do not, nor does what a network lets through before it limits the rate.

    host a   --- marker, message, message --->   host b        ... and to the host after the next, and so on around

Each leader then knows how fast it has received from two hosts. The rate of a link is the best rate of the messages that
its host has sent or received, since a slow link at the other end counts there. Messages grow until the slowest takes
`ENOUGH_SECONDS`. So the measurement takes less than a second where links have 20 Mbit/s or more.

With one or two hosts nothing is measured: the bytes on their links do not depend on which process owns what. After a
death or a growth, the remaining processes say what they know. A new process counts as one with a fast link.
"""

from __future__ import annotations

import time
from itertools import pairwise

import torch

from unisono.distributed.process_group import Message, ProcessGroup, wait_for

HOSTS = 3
"""With fewer hosts, links are not measured."""

SHIFTS = (1, 2)
"""A leader sends to the leaders this many places further."""

SMALLEST, FACTOR, LARGEST = 1 << 16, 8, 1 << 22
"""Bytes of the first message, by how much they grow, and of the largest message."""

ENOUGH_SECONDS = 0.02
"""Messages stop growing when the slowest takes this long."""

FASTEST = 1e11
"""Bytes per second of the fastest link. A late process finds both messages there, which says nothing of the link."""


def find_links(group: ProcessGroup, known: float = 0.0) -> tuple[float, ...]:
    """Return bytes per second of the link of each rank's host; () where they do not matter. Collective.

    Args:
        group: The processes.
        known: The rate of this host's link in the previous group; 0: not known.
    """
    hosts = group.hosts or tuple(range(group.size))
    if len(set(hosts)) < HOSTS or group.mixed or group.device.type != "cpu" or not group.on_gloo:
        return ()
    rates = torch.zeros(group.size, dtype=torch.float64)
    rates[hosts[group.rank]] = known
    group.max_(rates)
    if not rates.any():
        rates = _measure(group, hosts)
    fastest = float(rates.max())
    return tuple(float(rates[host]) or fastest for host in hosts)


def _measure(group: ProcessGroup, hosts: tuple[int, ...]) -> torch.Tensor:
    """Return the rate of the link of each leader; 0 for other ranks."""
    leaders = sorted(set(hosts))
    size = SMALLEST
    while True:
        found = torch.zeros(group.size + 1, dtype=torch.float64)  # the rates, and the longest time of a message
        if group.rank in leaders:
            for shift in SHIFTS:
                source, seconds = _shift(group, leaders, shift, size)
                for leader in (source, group.rank):
                    found[leader] = max(float(found[leader]), size / seconds)
                found[-1] = max(float(found[-1]), seconds)
        group.max_(found)
        if found[-1] >= ENOUGH_SECONDS or size >= LARGEST:
            return found[:-1]
        size *= FACTOR


def _shift(group: ProcessGroup, leaders: list[int], shift: int, size: int) -> tuple[int, float]:
    """Send messages to the leader `shift` places further. Return the sender of ours, and the seconds that one took."""
    place = leaders.index(group.rank)
    target, source = leaders[(place + shift) % len(leaders)], leaders[place - shift]
    lengths = (1, size, size)
    sends = [Message(torch.zeros(length, dtype=torch.uint8), target) for length in lengths]
    receives = [Message(torch.empty(length, dtype=torch.uint8), source) for length in lengths]
    works = group.send_and_receive(sends, receives)
    arrivals: list[float] = []
    for work in works[: len(lengths)]:
        wait_for([work])
        arrivals.append(time.perf_counter())
    wait_for(works[len(lengths) :])
    return source, max(size / FASTEST, *(end - start for start, end in pairwise(arrivals)))
