"""The ways of chunks between hosts: the sums are the tree's, and few bytes cross a link."""

from __future__ import annotations

import random
from typing import Any

import pytest

from unisono.plan.assignment import assign_evenly
from unisono.plan.host_routes import HostRoutes
from unisono.plan.reduction_tree import Node, Plan, ScatteredPlan, fold

SHAPES = ["a", "aa", "ab", "aabb", "abab", "aaabbb", "aabbb", "abcabc", "aaaabbbbccccdddd", "abbbbbbb", "aabccc"]


def routes_of(plan: Plan, hosts: str) -> list[HostRoutes]:
    return [HostRoutes(plan, list(map(hosts.index, hosts)), rank) for rank in range(len(hosts))]


def brackets(left: Any, right: Any) -> Any:
    """Add symbolically: the result shows the order of additions."""
    return f"({left}{right})"


def exchange(plan: Plan, hosts: str) -> list[str]:
    """Play the exchange of one gradient. Return what each owner of a chunk has added up."""
    every = routes_of(plan, hosts)
    leaves = {Node(v, v + 1): f"{v}." for v in range(plan.leaves)}
    held = {
        (rank, i): fold(node, leaves, brackets) for rank in range(plan.size) for i, node in enumerate(plan.sends(rank))
    }
    found = []
    for chunk, owner in enumerate(every):
        terms = [held[place] for place in owner.holders(owner.host)]
        for host in owner.remote_hosts:
            sender = every[owner.forwarder(host, chunk)]
            assert chunk in sender.forwarded
            local = [held[place] for place in sender.holders(host)]
            pairs, left, nodes = sender.on_host(host)
            for i, j in pairs:
                local[i] = brackets(local[i], local[j])
            assert nodes == owner.received[host]
            terms += [local[i] for i in left]
        for i, j in owner.additions:
            terms[i] = brackets(terms[i], terms[j])
        found.append(terms[owner.additions[-1][0]] if owner.additions else terms[0])
    return found


@pytest.mark.parametrize("hosts", SHAPES)
@pytest.mark.parametrize("leaves", [1, 5, 8, 16, 23])
def test_every_owner_makes_the_sum_of_the_tree(leaves: int, hosts: str) -> None:
    alone = fold(Node(0, leaves), {Node(v, v + 1): f"{v}." for v in range(leaves)}, brackets)
    draw = random.Random(leaves)
    bounds = sorted(draw.randrange(leaves + 1) for _ in hosts[1:])
    uneven = tuple(zip([0, *bounds], [*bounds, leaves], strict=True))
    owners = tuple(draw.randrange(len(hosts)) for _ in range(leaves))
    plans = [
        Plan(leaves, tuple(assign_evenly(leaves, len(hosts)))),
        Plan(leaves, uneven),
        ScatteredPlan(leaves, ((0, 0),) * len(hosts), owners),
    ]
    for plan in plans:
        assert exchange(plan, hosts) == [alone] * len(hosts)


@pytest.mark.parametrize("hosts", SHAPES)
def test_one_process_of_each_host_forwards_a_chunk(hosts: str) -> None:
    plan = Plan(32, tuple(assign_evenly(32, len(hosts))))
    for host in set(hosts):
        forwarded = [chunk for each in routes_of(plan, hosts) if hosts[each.rank] == host for chunk in each.forwarded]
        assert sorted(forwarded) == [chunk for chunk, owner in enumerate(hosts) if owner != host]


@pytest.mark.parametrize(("count", "processes"), [(2, 1), (2, 4), (4, 2), (4, 8), (8, 8)])
def test_a_link_carries_the_bytes_of_one_process_a_host(count: int, processes: int) -> None:
    """The bound is that of a ring all-reduce over hosts (Patarasuk and Yuan, 2009)."""
    hosts = "".join(chr(97 + host) * processes for host in range(count))
    plan = Plan(64, tuple(assign_evenly(64, len(hosts))))
    for host in set(hosts):
        crossing = sum(each.crossing() for each in routes_of(plan, hosts) if hosts[each.rank] == host)
        assert crossing == pytest.approx(2 * (count - 1) / count)


def test_messages_between_hosts_grow_with_hosts_and_not_with_processes() -> None:
    hosts = "".join(chr(97 + host) * 16 for host in range(8))
    plan = Plan(128, tuple(assign_evenly(128, 128)))
    for each in routes_of(plan, hosts):
        peers = set(each.forwarded) | {each.forwarder(h, each.rank) for h in each.remote_hosts}
        assert len(peers) == 7
