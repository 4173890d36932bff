"""Measure by how much the clocks of hosts differ, with messages between two processes.

    rank 0             t0 ------------------> host B reads its clock: tb ------------------> t1

If both messages take equally long, host B reads its clock at (t0 + t1) / 2 of rank 0's clock. The error is at most half
of the round trip, so that the quickest of several round trips counts (Mills, RFC 5905, section 8).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from unisono.distributed.process_group import Message, ProcessGroup, wait_for

TRIPS = 8
"""Round trips for each host. The first one may have to open a connection."""


class ClockDifference(NamedTuple):
    """The difference of a host's clock.

    Attributes:
        offset_us: Microseconds by which it is ahead of the clock of rank 0's host.
        round_trip_us: Microseconds of the quickest round trip: twice the largest error.
    """

    offset_us: float
    round_trip_us: float


def measure_clocks(
    group: ProcessGroup, hosts: Sequence[str], now: Callable[[], int] = time.time_ns
) -> dict[str, ClockDifference]:
    """Return the differences of the clocks of all other hosts, on rank 0; on other ranks {}. All processes call this.

    Args:
        group: The processes.
        hosts: The host of each rank.
        now: Returns nanoseconds since 1970.
    """
    found = {}
    for host in dict.fromkeys(hosts):
        there = hosts.index(host)
        if host != hosts[0] and group.rank in (0, there):
            difference = _measure(group, there, now)
            if difference is not None:
                found[host] = difference
    return found


def _measure(group: ProcessGroup, there: int, now: Callable[[], int]) -> ClockDifference | None:
    """Exchange messages between rank 0 and a rank of another host. Return the difference on rank 0."""
    trips: list[tuple[int, float]] = []
    for _ in range(TRIPS):
        if group.rank == 0:
            sent = now()
            _send(group, there, sent)
            read = _receive(group, there)
            received = now()
            trips.append((received - sent, read - (sent + received) / 2))
        else:
            _receive(group, 0)
            _send(group, 0, now())
    if not trips:
        return None
    took, offset = min(trips)
    return ClockDifference(round(offset / 1000, 1), round(took / 1000, 1))


def _send(group: ProcessGroup, peer: int, value: int) -> None:
    message = torch.tensor([value], dtype=torch.int64, device=group.device)
    wait_for(group.send_and_receive([Message(message, peer)], []))


def _receive(group: ProcessGroup, peer: int) -> int:
    message = torch.zeros(1, dtype=torch.int64, device=group.device)
    wait_for(group.send_and_receive([], [Message(message, peer)]))
    return int(message.item())
