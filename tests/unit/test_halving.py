"""Halving and doubling along the tree: which hosts it suits, and that every element is added up in the tree's order."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest

from unisono.plan import halving
from unisono.plan.assignment import assign, assign_evenly
from unisono.plan.halving import GatherMessages, Halving, find_halving
from unisono.plan.host_routes import HostRoutes
from unisono.plan.reduction_tree import Node, Plan, ScatteredPlan, fold

LENGTH, UNIT = 64, 2


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
    """Play the exchange of one gradient. Return the totals of each rank's region, a text for each element."""
    leaves = {Node(v, v + 1): f"{v}." for v in range(plan.leaves)}
    regions = [each.regions(LENGTH, UNIT)[rank] for rank, each in enumerate(every)]
    sizes = [region.stop - region.start for region in regions]
    rounds = [each.rounds(size, UNIT) for each, size in zip(every, sizes, strict=True)]
    held: list[dict[Node, dict[int, str]]] = []  # of each rank: the elements of partial sums
    for each, size in zip(every, sizes, strict=True):
        terms = [fold(node, leaves, brackets) for rank in each.routes.local for node in plan.sends(rank)]
        pairs, left, nodes = each.routes.on_host(each.routes.host)
        for i, j in pairs:
            terms[i] = brackets(terms[i], terms[j])
        held.append({node: dict.fromkeys(range(size), terms[i]) for node, i in zip(nodes, left, strict=True)})
    for k in range(every[0].count):
        mail: dict[tuple[int, int], list[tuple[slice, list[str]]]] = defaultdict(list)
        for rank, of_rank in enumerate(rounds):
            for node, part in of_rank[k].sends:
                assert part.rank != rank
                elements = range(part.elements.start, part.elements.stop)
                mail[rank, part.rank].append((part.elements, [held[rank][node][i] for i in elements]))
        for rank, of_rank in enumerate(rounds):
            for merge in of_rank[k].merges:
                sides = []
                for operand in (merge.left, merge.right):
                    side: dict[int, str] = {}
                    for part in operand.parts:
                        elements = range(part.elements.start, part.elements.stop)
                        if part.rank == rank:
                            side |= {i: held[rank][operand.node][i] for i in elements}
                        else:
                            where, values = mail[part.rank, rank].pop(0)  # in the order of sending
                            assert where == part.elements
                            side |= dict(zip(elements, values, strict=True))
                    sides.append(side)
                kept = range(merge.kept.start, merge.kept.stop)
                held[rank][merge.node] = {i: brackets(sides[0][i], sides[1][i]) for i in kept}
        assert not any(mail.values())
    totals = [each.get(Node(0, plan.leaves), {}) for each in held]
    return gather([each.gather_totals(size, UNIT) for each, size in zip(every, sizes, strict=True)], totals, sizes)


def gather(rounds: list[list[GatherMessages]], have: list[dict[int, Any]], sizes: list[int]) -> list[list[Any]]:
    """Play the rounds that gather. Return what each rank has in the end."""
    for k in range(max(map(len, rounds))):
        before = [dict(each) for each in have]
        for rank, of_rank in enumerate(rounds):
            if of_rank:
                now = of_rank[k]
                assert rounds[now.source][k].to == rank
                assert rounds[now.source][k].sent == now.received
                have[rank] |= {i: before[now.source][i] for each in now.received for i in range(each.start, each.stop)}
    return [[each[i] for i in range(size)] for each, size in zip(have, sizes, strict=True)]


def require_sums(plan: Plan, hosts: str) -> None:
    """Assert that all ranks with a region get its totals, added up in the order of the tree, and all weights."""
    alone = fold(Node(0, plan.leaves), {Node(v, v + 1): f"{v}." for v in range(plan.leaves)}, brackets)
    every = [each for each in halvings(plan, hosts) if each is not None]
    assert len(every) == len(hosts)
    assert len({(each.count, each.gathers) for each in every}) == 1
    regions = every[0].regions(LENGTH, UNIT)
    places = {region.start: region for region in regions if region.stop > region.start}
    assert sum(region.stop - region.start for region in places.values()) == LENGTH
    assert play(plan, every, hosts) == [[alone] * (region.stop - region.start) for region in regions]
    if isinstance(plan, ScatteredPlan):
        return  # the weights are known before
    found = [each.gather_weights() for each in every]
    own = [
        {place: v for place, v in enumerate(order) if hosts[holder(plan, v)] == hosts[rank] and rounds}
        for rank, (order, rounds) in enumerate(found)
    ]
    sizes = [plan.leaves if rounds else 0 for _, rounds in found]
    assert gather([rounds for _, rounds in found], own, sizes) == [order if rounds else [] for order, rounds in found]
    assert all(len(rounds) <= each.count for each, (_, rounds) in zip(every, found, strict=True))
    makes_totals = [
        any(merge.kept.stop > merge.kept.start for merge in each.rounds(LENGTH, UNIT)[-1].merges) for each in every
    ]
    assert all(rounds for makes, (_, rounds) in zip(makes_totals, found, strict=True) if makes)


def holder(plan: Plan, leaf: int) -> int:
    """Return the rank that holds a leaf."""
    return next(rank for rank, (lo, hi) in enumerate(plan.spans) if lo <= leaf < hi)


HOSTS = ["ab", "abcd", "dcab", "aabb", "aaabbb", "aabbccdd", "abcdefgh", "aaaabbbbccccdddd"]
ODD = ["abc", "abcde", "aabbcc", "aab", "abbbcc", "abab", "abcabc", "abcdefghijk"]


@pytest.mark.parametrize("hosts", [*HOSTS, *ODD])
@pytest.mark.parametrize("factor", [1, 2, 3, 5])
def test_every_element_is_added_up_in_the_order_of_the_tree(hosts: str, factor: int) -> None:
    leaves = len(hosts) * factor
    require_sums(Plan(leaves, tuple(assign_evenly(leaves, len(hosts)))), hosts)


@pytest.mark.parametrize(
    ("hosts", "spans"),
    [
        ("aabcd", ((0, 3), (3, 6), (6, 8), (8, 8), (8, 8))),  # hosts without a virtual rank
        ("aab", ((0, 2), (2, 4), (4, 8))),
        ("ab", ((0, 3), (3, 8))),
        ("abcd", ((0, 4), (4, 6), (6, 7), (7, 8))),
        ("abcd", ((0, 1), (1, 2), (2, 15), (15, 16))),
        ("abcdef", ((0, 3), (3, 3), (3, 4), (4, 19), (19, 22), (22, 23))),
        ("abcdefghijklmnopq", (*((v, v + 1) for v in range(16)), (16, 64))),
    ],
)
def test_uneven_spans(hosts: str, spans: tuple[tuple[int, int], ...]) -> None:
    require_sums(Plan(spans[-1][1], spans), hosts)


def test_random_spans_and_hosts() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        size = rng.randint(2, 12)
        leaves = rng.randint(2, 40)
        cuts = sorted(rng.choices(range(leaves + 1), k=size - 1))
        plan = Plan(leaves, tuple(pairwise([0, *cuts, leaves])))
        hosts = "".join(rng.choices("abcdef", k=size))
        if len({hosts[holder(plan, leaf)] for leaf in range(leaves)}) > 1:
            require_sums(plan, hosts)
        owners = tuple(rng.randrange(size) for _ in range(leaves))
        if len({hosts[owner] for owner in owners}) > 1:
            require_sums(ScatteredPlan(leaves, ((0, 0),) * size, owners), hosts)


@pytest.mark.parametrize("processes", [1, 2])
def test_equal_hosts_meet_one_partner_in_each_round(processes: int) -> None:
    hosts = "".join(chr(97 + host) * processes for host in range(64))
    plan = Plan(128, tuple(assign_evenly(128, len(hosts))))
    for each in halvings(plan, hosts):
        assert each is not None
        partners = [{part.rank for _, part in now.sends} for now in each.rounds(1 << 16, UNIT)]
        assert [len(found) for found in partners] == [1] * 6
        gathers = each.gather_totals(1 << 16, UNIT)
        assert {now.to for now in gathers} == {now.source for now in gathers} == set.union(*partners)
        sent = sum(
            part.elements.stop - part.elements.start for now in each.rounds(1 << 16, UNIT) for _, part in now.sends
        )
        assert sent == (1 << 16) - (1 << 10)  # as with direct messages


@pytest.mark.parametrize(("count", "leaves"), [(33, 33), (48, 64), (100, 256), (127, 1024)])
def test_messages_grow_with_the_logarithm_of_hosts(count: int, leaves: int) -> None:
    speeds = [1 + random.Random(rank).random() for rank in range(count)]
    plan = Plan(leaves, tuple(assign(leaves, speeds)))
    partial_sums = max(len(plan.sends(rank)) for rank in range(count))
    for rank in range(0, count, 7):
        each = find_halving(HostRoutes(plan, range(count), rank))
        assert each is not None
        rounds = each.rounds(1 << 16, UNIT)
        sends = [part for now in rounds for _, part in now.sends]
        assert len(sends) + each.gathers <= 4 * math.log2(leaves)
        peers = {part.rank for part in sends}
        peers |= {part.rank for now in rounds for merge in now.merges for o in merge[2:] for part in o.parts}
        for now in each.gather_totals(1 << 16, UNIT):
            peers |= {now.to, now.source}
        assert len(peers) <= 5 * math.log2(leaves)
        elements = sum(part.elements.stop - part.elements.start for part in sends)
        assert elements <= (partial_sums + 1) * (1 << 16)


def test_links_of_unlike_speed_use_direct_messages() -> None:
    plan = Plan(8, tuple(assign_evenly(8, 4)))
    assert halvings(plan, "abcd", (1.0, 1.0, 1.0, 0.2)) == [None] * 4
    assert None not in halvings(plan, "abcd", (1.0, 1.0, 1.0, 0.9))


@pytest.mark.parametrize("hosts", ["aaa", "aab"])
def test_sums_of_one_host_use_direct_messages(hosts: str) -> None:
    assert halvings(Plan(8, ((0, 3), (3, 8), (8, 8))), hosts) == [None] * 3
