"""The sum of the tree for any assignment and order of leaves, with gradients whose sum shows every order."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks.test_exchange import expected_gradients, leaf, on_hosts, parameters, step
from unisono.distributed.init import join_process_group as join
from unisono.environment import World
from unisono.exchange.tree.dynamic_tree import DynamicTree
from unisono.plan.assignment import assign_evenly
from unisono.testing import run_ranks


def dynamic_step(
    exchange: DynamicTree, params: list[nn.Parameter], pieces: dict[int, int], taken: list[list[int]], rank: int
) -> Any:
    """Run a step in which process r computes the virtual ranks taken[r], in this order."""
    ranks = exchange.virtual_ranks
    weights = torch.zeros(ranks, dtype=torch.float64)
    weights[taken[rank]] = 7.0 / sum(map(len, taken))
    exchange.begin((), pieces, lambda: weights)
    for v in taken[rank]:
        for _ in range(pieces[v]):
            exchange.enter(v, last=False)
            torch.stack([(p * leaf(v, p)).sum() for p in params]).sum().backward()
            exchange.leave()
    exchange.launch()
    exchange.finish(7.0)
    exchange.commit()
    grads = [p.grad.flatten().tolist() for p in params if p.grad is not None]
    exchange.zero()
    return grads


def wrong_sums(world: World, hosts: str) -> list[Any]:
    """Run steps with and without spans in one exchange; return those with a wrong sum."""
    wrong: list[Any] = []
    dice = random.Random(9)
    with join(world) as group:
        for virtual_ranks in (2, 3, 5, 8, 12, 13):
            params = parameters()
            exchange = DynamicTree(params, virtual_ranks, on_hosts(group, hosts))
            for turn in range(16):
                pieces = {v: dice.choice([0, 1, 1, 2]) for v in range(virtual_ranks)}
                pieces[dice.randrange(virtual_ranks)] += 1
                busy = [v for v in pieces if pieces[v]]
                dice.shuffle(busy)
                taken: list[list[int]] = [[] for _ in range(group.size)]
                for v in busy:
                    taken[dice.randrange(group.size)].append(v)  # a process may get no virtual rank
                if turn % 4 == 3:
                    spans = assign_evenly(virtual_ranks, group.size)
                    grads = step(exchange, params, spans, pieces, group.rank)
                else:
                    grads = dynamic_step(exchange, params, pieces, taken, group.rank)
                if grads != expected_gradients(virtual_ranks, pieces):
                    wrong.append((virtual_ranks, pieces, taken, turn))
            exchange.close()
    return wrong


@pytest.mark.parametrize("hosts", ["aa", "ab", "aaa", "aba"])
def test_any_assignment_and_order_of_leaves_gives_the_sum_of_the_tree(hosts: str) -> None:
    assert run_ranks(wrong_sums, len(hosts), hosts) == [[]] * len(hosts)
