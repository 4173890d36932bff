"""The rates of links are measured between hosts, and equal on all processes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.ranks.test_exchange import on_hosts
from unisono.distributed import link_rates
from unisono.distributed.init import join_process_group as join
from unisono.distributed.link_rates import FASTEST, find_links
from unisono.environment import World
from unisono.testing import run_ranks


def links_of(world: World, hosts: str, known: tuple[float, ...]) -> tuple[float, ...]:
    with join(world) as group:
        assert group.links == ()  # all are on one host
        placed = replace(on_hosts(group, hosts), links=())
        return find_links(placed, known[group.rank])


@pytest.mark.parametrize("hosts", ["abc", "aabbc"])
def test_all_processes_know_the_rate_of_every_link(hosts: str) -> None:
    first, *others = run_ranks(links_of, len(hosts), hosts, (0.0,) * len(hosts))
    assert all(other == first for other in others)
    assert len(first) == len(hosts)
    assert all(1e5 < rate <= FASTEST for rate in first)
    assert all(first[rank] == first[hosts.index(host)] for rank, host in enumerate(hosts))


def links_of_late_processes(world: World) -> tuple[float, ...]:
    link_rates.time = SimpleNamespace(perf_counter=lambda: 1.0)  # type: ignore[assignment]
    return links_of(world, "abc", (0.0,) * 3)


def test_late_processes_do_not_count_as_faster_than_any_link() -> None:
    assert run_ranks(links_of_late_processes, 3) == [(FASTEST,) * 3] * 3


def test_two_hosts_have_no_rates() -> None:
    assert run_ranks(links_of, 3, "aab", (0.0,) * 3) == [()] * 3


def test_known_rates_are_kept_and_a_new_host_counts_as_fast() -> None:
    assert run_ranks(links_of, 4, "aabc", (2.0, 2.0, 0.0, 5.0)) == [(2.0, 2.0, 5.0, 5.0)] * 4
