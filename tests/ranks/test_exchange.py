"""The tree exchange by itself, with gradients whose sum shows every order of addition."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from unisono.distributed.init import join_process_group as join
from unisono.distributed.process_group import Message, ProcessGroup
from unisono.environment import World
from unisono.errors import LoopError
from unisono.exchange.bucket_readiness import BucketReadiness
from unisono.exchange.buckets import BucketLayout
from unisono.exchange.gradient_accumulation import FlatGradient
from unisono.exchange.tree.tree_exchange import TreeExchange
from unisono.plan.assignment import assign_evenly
from unisono.plan.reduction_tree import Node, fold
from unisono.testing import run_ranks


def parameters() -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(0)
    shapes = [(3, 5), (7,), (1, 2, 3), (40, 11), ()]
    return [nn.Parameter(torch.randn(shape, generator=g)) for shape in shapes]


def leaf(virtual_rank: int, p: torch.Tensor) -> torch.Tensor:
    """Return a gradient whose magnitudes spread over 16 decimal places, so that every other order gives other bits."""
    g = torch.Generator().manual_seed(100 + virtual_rank)
    return torch.randn(p.shape, generator=g) * 10.0 ** torch.randint(-8, 9, p.shape, generator=g)


def uses(virtual_rank: int, number: int, sparsely: bool) -> bool:
    """Return whether a virtual rank uses parameter `number`."""
    return not sparsely or (virtual_rank * 5 + number) % 4 == 0


def expected_gradients(virtual_ranks: int, pieces: dict[int, int], sparsely: bool = False) -> list[list[float]]:
    """Compute the tree over the leaves by the recursion that defines it."""
    out = []
    for number, p in enumerate(parameters()):
        leaves = {
            Node(v, v + 1): sum(
                (leaf(v, p) for _ in range(pieces[v]) if uses(v, number, sparsely)), torch.zeros(p.shape)
            )
            for v in range(virtual_ranks)
        }
        out.append((fold(Node(0, virtual_ranks), leaves, torch.add) / 7.0).flatten().tolist())
    return out


def weigh(span: tuple[int, int], weight: float = 1.0) -> Callable[[], torch.Tensor]:
    return lambda: torch.full((span[1] - span[0],), weight, dtype=torch.float64)


def step(
    exchange: TreeExchange,
    params: list[nn.Parameter],
    spans: Any,
    pieces: dict[int, int],
    rank: int,
    sparsely: bool = False,
    announced: bool = True,
) -> Any:
    mine = {v: pieces[v] for v in range(*spans[rank])}
    exchange.begin(spans, mine, weigh(spans[rank], 7 / spans[-1][1]))
    left = sum(mine.values())
    for v, count in mine.items():
        for _ in range(count):
            exchange.enter(v, last=announced and left == 1)
            used = [p for number, p in enumerate(params) if uses(v, number, sparsely)]
            torch.stack([(p * leaf(v, p).to(p.device)).sum() for p in used]).sum().backward()
            exchange.leave()
            left -= 1
    exchange.launch()
    exchange.finish(7.0)
    exchange.commit()
    grads = [p.grad.flatten().tolist() for p in params if p.grad is not None]
    exchange.zero()
    return grads


def run_exchange(
    world: World,
    virtual_ranks: int,
    spans: Any,
    pieces: dict[int, int],
    bucket_bytes: int,
    hosts: str = "aaaaaaaa",
    sparsely: bool = False,
    links: tuple[float, ...] = (),
) -> Any:
    with join(world) as group:
        params = parameters()
        placed = replace(on_hosts(group, hosts), links=links)
        exchange = with_bucket_bytes(TreeExchange(params, virtual_ranks, placed), bucket_bytes)
        return [step(exchange, params, spans, pieces, group.rank, sparsely and i > 0) for i in range(3)]


def on_hosts(group: ProcessGroup, hosts: str) -> ProcessGroup:
    """Pretend that rank r is on host hosts[r], so that only ranks on one host are neighbors."""
    assert len(group.neighbors) == group.size - 1  # this machine can share memory
    neighbors = {r: pid for r, pid in group.neighbors.items() if hosts[r] == hosts[group.rank]}
    return replace(group, neighbors=neighbors, hosts=tuple(map(hosts.index, hosts[: group.size])))


def with_bucket_bytes(exchange: TreeExchange, bucket_bytes: int) -> TreeExchange:
    """Rebuild an exchange with smaller buckets."""
    exchange.ready.close()
    exchange.layout = exchange.pool.layout = BucketLayout(exchange.params, exchange.group.size, bucket_bytes)
    exchange.ready = BucketReadiness(exchange.layout, complete=exchange._merge)
    return exchange


@pytest.mark.parametrize("hosts", ["a", "aa", "ab", "aaa", "abb", "aaaa", "abca", "aabb"])
@pytest.mark.parametrize(
    ("virtual_ranks", "pieces", "bucket_bytes"), [(8, 1, 100), (8, 3, 2**20), (5, 1, 2**20), (7, 2, 600)]
)
def test_the_sum_is_that_of_the_tree(hosts: str, virtual_ranks: int, pieces: int, bucket_bytes: int) -> None:
    counts = dict.fromkeys(range(virtual_ranks), pieces)
    expected, spans = expected_gradients(virtual_ranks, counts), assign_evenly(virtual_ranks, len(hosts))
    for rank in run_ranks(run_exchange, len(hosts), virtual_ranks, spans, counts, bucket_bytes, hosts):
        for grads in rank:
            assert grads == expected


@pytest.mark.parametrize(("hosts", "links"), [("abc", (10.0, 10.0, 1.0)), ("aabc", (1.0, 1.0, 10.0, 6.0))])
def test_links_of_unlike_speed_give_the_same_sum(hosts: str, links: tuple[float, ...]) -> None:
    """The first or last host owns no part of the gradient, or a small one."""
    counts = dict.fromkeys(range(8), 2)
    expected, spans = expected_gradients(8, counts), assign_evenly(8, len(hosts))
    for rank in run_ranks(run_exchange, len(hosts), 8, spans, counts, 600, hosts, False, links):
        for grads in rank:
            assert grads == expected


@pytest.mark.parametrize("hosts", ["aaa", "aab"])
@pytest.mark.parametrize("spans", [((0, 1), (1, 8)), ((0, 0), (0, 8)), ((0, 3), (3, 3), (3, 8)), ((0, 7), (7, 8))])
def test_any_spans_give_the_same_sum(spans: Any, hosts: str) -> None:
    counts = {0: 1, 1: 0, 2: 2, 3: 1, 4: 0, 5: 0, 6: 1, 7: 3}
    expected = expected_gradients(8, counts)
    for rank in run_ranks(run_exchange, len(spans), 8, spans, counts, 100, hosts):
        assert rank[0] == rank[2] == expected


def wrong_steps_with_empty_ranks(world: World) -> list[Any]:
    """Run steps with empty virtual ranks, as in an epoch's last batch; return those with a wrong sum."""
    wrong: list[Any] = []
    rng = random.Random(4)
    with join(world) as group:
        for virtual_ranks in (3, 5, 6, 7, 8, 11, 12, 16):
            params, spans = parameters(), assign_evenly(virtual_ranks, group.size)
            exchange = TreeExchange(params, virtual_ranks, group)
            for _ in range(25):
                share = rng.random()
                counts = {v: (rng.random() < share) * rng.choice([1, 1, 2]) for v in range(virtual_ranks)}
                counts[rng.randrange(virtual_ranks)] += 1
                announced = rng.random() < 0.7
                grads = step(exchange, params, spans, counts, group.rank, announced=announced)
                if grads != expected_gradients(virtual_ranks, counts):
                    wrong.append((virtual_ranks, counts, announced))
            exchange.close()
    return wrong


@pytest.mark.parametrize("size", [1, 2, 3])
def test_empty_virtual_ranks_count_as_zeros(size: int) -> None:
    assert run_ranks(wrong_steps_with_empty_ranks, size) == [[]] * size


@pytest.mark.parametrize("hosts", ["a", "aa", "ab", "aba"])
def test_parameters_that_a_process_does_not_use_count_as_zeros(hosts: str) -> None:
    """Later steps use a part of the parameters, so some buckets are complete on some processes only."""
    counts = dict.fromkeys(range(8), 1)
    whole, part = expected_gradients(8, counts), expected_gradients(8, counts, sparsely=True)
    for rank in run_ranks(run_exchange, len(hosts), 8, assign_evenly(8, len(hosts)), counts, 100, hosts, True):
        assert rank == [whole, part, part]


def test_these_gradients_show_another_order_of_addition() -> None:
    """The tests above can fail."""
    (p, *_) = parameters()
    chain = sum((leaf(v, p) for v in range(8)), torch.zeros(p.shape)) / 7.0
    assert chain.flatten().tolist() != expected_gradients(8, dict.fromkeys(range(8), 1))[0]


# -- complete buckets


def launched_in_backward(world: World) -> list[int]:
    """Return the number of buckets that were launched when the last backward of each step returned."""
    with join(world) as group:
        model = nn.Sequential(*[nn.Linear(20, 20) for _ in range(4)])
        exchange = with_bucket_bytes(TreeExchange(list(model.parameters()), 2, group), 2000)
        seen = []
        for _ in range(3):
            exchange.begin(((0, 1), (1, 2)), {group.rank: 1}, weigh((0, 1)))
            exchange.enter(group.rank, last=True)
            model(torch.ones(1, 20)).sum().backward()
            seen.append(exchange.ready.next)
            exchange.leave()
            exchange.launch()
            exchange.finish(2.0)
            exchange.commit()
            exchange.zero()
        return [*seen, len(exchange.layout.buckets)]


def test_buckets_are_sent_while_backward_runs() -> None:
    """In the first step the hooks only count; later, all buckets are sent before backward returns."""
    for first, second, third, buckets in run_ranks(launched_in_backward, 2):
        assert (first, second, third) == (0, buckets, buckets)
        assert buckets == 4


def recompute(world: World) -> tuple[int, list[float]]:
    """Use a layer twice under a nested backward, so its gradient is accumulated twice."""
    with join(world) as group:
        torch.manual_seed(0)
        layer, head = nn.Linear(4, 4), nn.Linear(4, 1)
        params = [*layer.parameters(), *head.parameters()]
        exchange = TreeExchange(params, 4, group)
        spans = assign_evenly(4, group.size)
        grads: list[float] = []
        for _ in range(2):
            mine = range(*spans[group.rank])
            exchange.begin(spans, dict.fromkeys(mine, 1), weigh(spans[group.rank]))
            for v in mine:
                exchange.enter(v, last=v == mine[-1])
                x = torch.full((2, 4), float(v), requires_grad=True)
                for _ in range(2):
                    x = checkpoint(layer, x, use_reentrant=True)
                head(x).sum().backward()
                exchange.leave()
            exchange.launch()
            exchange.finish(4.0)
            exchange.commit()
            grads = [x for p in params if p.grad is not None for x in p.grad.flatten().tolist()]
            exchange.zero()
        return max(exchange.ready.expected), grads


def test_a_parameter_accumulated_twice_in_one_backward_is_waited_for() -> None:
    one = run_ranks(recompute, 1)[0]
    assert one[0] == 2
    for rank in run_ranks(recompute, 2):
        assert rank == one


def error_of_varying_recomputation(world: World) -> str:
    """Recompute a layer once for the first virtual rank of a pair, and four times for the second."""
    with join(world) as group:
        layer = nn.Linear(4, 4)
        exchange = TreeExchange(list(layer.parameters()), 2, group)
        exchange.begin(((0, 2),), {0: 1, 1: 1}, weigh((0, 2)))
        for v, depth in ((0, 1), (1, 4)):
            exchange.enter(v, last=v == 1)
            x = torch.full((2, 4), float(v), requires_grad=True)
            for _ in range(depth):
                x = checkpoint(layer, x, use_reentrant=True)
            x.sum().backward()
            try:
                exchange.leave()
            except LoopError as error:
                return str(error)
        return "no error"


def test_a_pair_with_varying_recomputation_is_refused() -> None:
    """The terms would be added to the other's sum one by one, which is another sum than on two processes."""
    (message,) = run_ranks(error_of_varying_recomputation, 1)
    assert "accumulated 4 times in this backward, never more than 1 times before" in message
    assert "use_reentrant=False" in message


def test_a_gradient_that_comes_too_late_is_refused() -> None:
    layer = nn.Linear(2, 2)
    layout = BucketLayout(list(layer.parameters()), 1)
    ready = BucketReadiness(layout, lambda bucket: None)
    for repeats in (1, 2):
        ready.begin()
        ready.enter(FlatGradient(layout), notify=False, last=True, launch=True)
        x = torch.ones(1, 2)
        if repeats == 1:
            layer(x).sum().backward()
            ready.leave()
        else:
            layer(x).sum().backward()
            with pytest.raises(LoopError, match="received another gradient after its sum had been sent"):
                layer(x).sum().backward()


def test_buckets_keep_strides_and_separate_dtypes() -> None:
    conv = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    half = nn.Parameter(torch.randn(5, dtype=torch.float64))
    exchange = TreeExchange([conv, half], 2, ProcessGroup())
    exchange.begin(((0, 2),), {0: 1, 1: 1}, weigh((0, 2)))
    exchange.enter(0, last=False)
    (conv.sum() + half.sum()).backward()
    assert conv.grad is not None
    assert conv.grad.stride() == conv.stride()
    assert half.grad is not None
    assert half.grad.dtype == torch.float64
    assert len(exchange.layout.buckets) == 2
    exchange.close()


def late(world: World) -> float:
    with join(world) as group:
        message = torch.zeros(1)
        if world.rank:
            time.sleep(6)  # more than connecting may take: the timeout that gloo's messages have by themselves
        sends, receives = ([Message(message + 7, 0)], []) if world.rank else ([], [Message(message, 1)])
        for work in group.send_and_receive(sends, receives):
            work.wait()
        return float(message)


@pytest.mark.slow
def test_a_message_waits_for_a_late_process() -> None:
    assert run_ranks(late, 2)[0] == 7.0
