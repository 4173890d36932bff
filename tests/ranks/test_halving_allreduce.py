"""Halving and doubling with real processes: the sum is that of the tree, with fewer messages."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks.test_exchange import expected_gradients, on_hosts, parameters, step, with_bucket_bytes
from unisono.distributed.init import join_process_group as join
from unisono.environment import World
from unisono.exchange.tree.dynamic_tree import DynamicTree
from unisono.exchange.tree.halving_allreduce import HalvingAllReduce
from unisono.exchange.tree.tree_allreduce import TreeAllReduce
from unisono.plan import halving
from unisono.plan.assignment import assign_evenly
from unisono.testing import run_ranks

LEAVES = 16


def run_halving(
    world: World, pieces: list[dict[int, int]], bucket_bytes: int, hosts: str, fewest: int, spans: Any = None
) -> Any:
    """Return the gradients of these steps."""
    halving.FEWEST_HOSTS = fewest
    spans = spans or assign_evenly(LEAVES, world.size)
    with join(world) as group:
        params = parameters()
        exchange = with_bucket_bytes(DynamicTree(params, LEAVES, on_hosts(group, hosts)), bucket_bytes)
        grads = [step(exchange, params, spans, counts, group.rank) for counts in pieces]
        assert type(exchange.transport) is HalvingAllReduce
        assert len(exchange.layout.buckets) > 1
    return grads


@pytest.mark.ci
@pytest.mark.parametrize("hosts", ["ab", "abc", "abcd", "aabb", "aabc", "abcdefgh", "aabbccdd"])
@pytest.mark.parametrize("bucket_bytes", [100, 600])
def test_the_sum_is_that_of_the_tree(hosts: str, bucket_bytes: int) -> None:
    """Some virtual ranks are empty, and with them whole processes."""
    steps = [dict.fromkeys(range(LEAVES), 1), dict.fromkeys(range(LEAVES), 2), {v: int(v > 7) for v in range(LEAVES)}]
    expected = [expected_gradients(LEAVES, counts) for counts in steps]
    for grads in run_ranks(run_halving, len(hosts), steps, bucket_bytes, hosts, 2):
        assert grads == expected


@pytest.mark.parametrize(
    ("hosts", "spans"),
    [
        ("ab", ((0, 3), (3, 16))),
        ("abcde", ((0, 1), (1, 2), (2, 15), (15, 16), (16, 16))),
        ("aabbc", ((0, 3), (3, 4), (4, 11), (11, 11), (11, 16))),
        ("abba", ((0, 4), (4, 7), (7, 11), (11, 16))),
    ],
)
def test_uneven_spans(hosts: str, spans: Any) -> None:
    counts = dict.fromkeys(range(LEAVES), 1)
    for grads in run_ranks(run_halving, len(hosts), [counts] * 3, 100, hosts, 2, spans):
        assert grads == [expected_gradients(LEAVES, counts)] * 3


def test_sixteen_hosts_halve() -> None:
    counts = dict.fromkeys(range(LEAVES), 1)
    hosts = "abcdefghijklmnop"
    for grads in run_ranks(run_halving, 16, [counts], 600, hosts, 16):
        assert grads == [expected_gradients(LEAVES, counts)]


def change_plans(world: World) -> list[Any]:
    """Return the kind of all-reduce and the gradients of steps under several plans."""
    halving.FEWEST_HOSTS = 2
    found: list[Any] = []
    counts = dict.fromkeys(range(LEAVES), 1)
    with join(world) as group:
        params = parameters()
        exchange = DynamicTree(params, LEAVES, on_hosts(group, "ab"))
        for spans in [((0, 8), (8, 16)), ((0, 5), (5, 16)), ((0, 16), (16, 16)), ((0, 4), (4, 16)), ((0, 8), (8, 16))]:
            grads = step(exchange, params, spans, counts, group.rank)
            found.append((type(exchange.transport), grads))
        exchange.close()
    return found


def test_a_new_plan_changes_the_messages_and_not_the_sum() -> None:
    """If one host has all virtual ranks, its sums go directly to the others."""
    expected = expected_gradients(LEAVES, dict.fromkeys(range(LEAVES), 1))
    kinds = [HalvingAllReduce, HalvingAllReduce, TreeAllReduce, HalvingAllReduce, HalvingAllReduce]
    assert run_ranks(change_plans, 2) == [[(kind, expected) for kind in kinds]] * 2
