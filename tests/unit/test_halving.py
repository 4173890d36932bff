"""Halving and doubling along the tree: which hosts it suits, and that every element is added up in the tree's order."""

from __future__ import annotations

from typing import Any

import pytest

from unisono.plan import halving
from unisono.plan.assignment import assign_evenly
from unisono.plan.halving import Halving, find_halving
from unisono.plan.host_routes import HostRoutes
from unisono.plan.reduction_tree import Node, Plan, ScatteredPlan, fold

LENGTH = 64


@pytest.fixture(autouse=True)
def _two_hosts_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halving, "FEWEST_HOSTS", 2)


def halvings(plan: Plan, hosts: str, links: tuple[float, ...] = ()) -> list[Halving | None]:
    places = list(map(hosts.index, hosts))
    return [find_halving(HostRoutes(plan, places, rank, links)) for rank in range(len(hosts))]


def brackets(left: Any, right: Any) -> Any:
    """Add symbolically: the result shows the order of additions."""
    return f"({left}{right})"


def play(plan: Plan, every: list[Halving], hosts: str) -> list[list[str]]:
    """Play the exchange of one gradient of LENGTH elements. Return the totals of each rank's region."""
    leaves = {Node(v, v + 1): f"{v}." for v in range(plan.leaves)}
    size = LENGTH // hosts.count(hosts[0])
    rounds = [each.rounds(size) for each in every]
    held = []
    for each in every:
        nodes = [node for rank in each.routes.local for node in plan.sends(rank)]
        terms = [fold(node, leaves, brackets) for node in nodes]
        pairs, left, _ = each.routes.on_host(each.routes.host)
        for i, j in pairs:
            terms[i] = brackets(terms[i], terms[j])
        held.append([terms[left[0]]] * size)
    for k in range(every[0].count):
        before = [list(values) for values in held]
        for rank, of_rank in enumerate(rounds):
            now = of_rank[k]
            assert rounds[now.partner][k].partner == rank
            assert rounds[now.partner][k].sent == now.kept
            assert rounds[now.partner][k].known == now.learned
            for i in range(now.kept.start, now.kept.stop):
                pair = before[rank][i], before[now.partner][i]
                held[rank][i] = brackets(*(pair if now.is_left else pair[::-1]))
    for k in reversed(range(every[0].count)):
        before = [list(values) for values in held]
        for rank, of_rank in enumerate(rounds):
            now = of_rank[k]
            held[rank][now.sent] = before[now.partner][now.sent]
    return held


@pytest.mark.parametrize("hosts", ["ab", "abcd", "dcab", "aabb", "aaabbb", "aabbccdd", "abcdefgh", "aaaabbbbccccdddd"])
@pytest.mark.parametrize("factor", [1, 2, 3, 5])
def test_every_element_is_added_up_in_the_order_of_the_tree(hosts: str, factor: int) -> None:
    leaves = len(hosts) * factor
    plan = Plan(leaves, tuple(assign_evenly(leaves, len(hosts))))
    alone = fold(Node(0, leaves), {Node(v, v + 1): f"{v}." for v in range(leaves)}, brackets)
    found = halvings(plan, hosts)
    every = [each for each in found if each is not None]
    assert len(every) == len(hosts)
    size = LENGTH // hosts.count(hosts[0])
    assert play(plan, every, hosts) == [[alone] * size] * len(hosts)


@pytest.mark.parametrize("processes", [1, 2])
def test_messages_grow_with_the_logarithm_of_hosts(processes: int) -> None:
    hosts = "".join(chr(97 + host) * processes for host in range(64))
    plan = Plan(128, tuple(assign_evenly(128, len(hosts))))
    for each in halvings(plan, hosts):
        assert each is not None
        rounds = each.rounds(LENGTH)
        assert len(rounds) == len({r.partner for r in rounds}) == 6
        assert sum(r.sent.stop - r.sent.start for r in rounds) == LENGTH - LENGTH // 64  # as with direct messages
        assert rounds[-1].known.hi - rounds[-1].known.lo == 64  # half of the weights


@pytest.mark.parametrize(
    ("hosts", "spans"),
    [
        ("aaa", ((0, 3), (3, 6), (6, 8))),  # one host
        ("abc", ((0, 3), (3, 6), (6, 8))),  # three hosts
        ("aab", ((0, 2), (2, 4), (4, 8))),  # unequal numbers of processes
        ("ab", ((0, 3), (3, 8))),  # several partial sums
        ("abcd", ((0, 4), (4, 6), (6, 7), (7, 8))),  # one partial sum each, on different levels
        ("abab", ((0, 2), (2, 4), (4, 6), (6, 8))),  # the processes of a host are not neighbors in the tree
    ],
)
def test_other_plans_use_direct_messages(hosts: str, spans: tuple[tuple[int, int], ...]) -> None:
    assert halvings(Plan(8, spans), hosts) == [None] * len(hosts)


def test_links_of_unlike_speed_use_direct_messages() -> None:
    plan = Plan(8, tuple(assign_evenly(8, 4)))
    assert halvings(plan, "abcd", (1.0, 1.0, 1.0, 0.2)) == [None] * 4
    assert None not in halvings(plan, "abcd", (1.0, 1.0, 1.0, 0.9))


def test_stolen_leaves_use_it_where_each_host_has_one_subtree() -> None:
    swapped = ScatteredPlan(8, ((0, 0),) * 2, owners=(1, 1, 1, 1, 0, 0, 0, 0))
    found = halvings(swapped, "ab")
    assert [each.rounds(8)[0].is_left for each in found if each is not None] == [False, True]
    assert halvings(ScatteredPlan(8, ((0, 0),) * 2, owners=(1, 0, 1, 1, 0, 0, 0, 0)), "ab") == [None, None]
