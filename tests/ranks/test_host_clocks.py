"""The clocks of hosts are compared with messages."""

from __future__ import annotations

import time

from unisono.distributed.init import join_process_group as join
from unisono.environment import World
from unisono.testing import run_ranks
from unisono.train.profiling.host_clocks import ClockDifference, measure_clocks

AHEAD = 3_000_000_000
"""Nanoseconds by which the clock of host b is ahead."""


def differences(world: World, hosts: list[str]) -> dict[str, ClockDifference]:
    ahead = AHEAD if hosts[world.rank] == "b" else 0
    with join(world) as group:
        return measure_clocks(group, hosts, lambda: time.time_ns() + ahead)


def test_the_difference_of_two_clocks_is_measured_within_half_a_round_trip() -> None:
    found, *others = run_ranks(differences, 4, ["a", "b", "a", "c"])
    assert others == [{}, {}, {}]
    assert set(found) == {"b", "c"}
    for host, ahead in (("b", AHEAD / 1000), ("c", 0.0)):
        assert abs(found[host].offset_us - ahead) <= found[host].round_trip_us / 2 + 1
        assert found[host].round_trip_us < 100_000


def test_one_host_needs_no_message() -> None:
    assert run_ranks(differences, 2, ["a", "a"]) == [{}, {}]
