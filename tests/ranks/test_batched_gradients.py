"""Gradients that are stored and added by bucket, as on accelerators, have the bits of those added one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.ranks.test_exchange import expected_gradients, on_hosts, parameters, step, with_bucket_bytes
from unisono.distributed.init import join_process_group as join
from unisono.distributed.process_group import ProcessGroup
from unisono.environment import World
from unisono.errors import LoopError
from unisono.exchange.bucket_readiness import BucketReadiness
from unisono.exchange.buckets import BucketLayout
from unisono.exchange.gradient_accumulation import FlatGradient
from unisono.exchange.single import SingleProcess
from unisono.exchange.tree.dynamic_tree import DynamicTree
from unisono.exchange.tree.tree_exchange import TreeExchange
from unisono.plan.assignment import assign_evenly
from unisono.testing import run_ranks


def batch_gradients(exchange: TreeExchange, bucket_bytes: int = 2**20) -> TreeExchange:
    """Store and add gradients by bucket, as if they were on an accelerator."""
    with_bucket_bytes(exchange, bucket_bytes)
    exchange.layout.batched = [True] * len(exchange.layout.buckets)
    return exchange


def run_batched(
    world: World, virtual_ranks: int, pieces: int, bucket_bytes: int, hosts: str, sparsely: bool, dynamic: bool
) -> Any:
    with join(world) as group:
        params, spans = parameters(), assign_evenly(virtual_ranks, group.size)
        kind = DynamicTree if dynamic else TreeExchange
        exchange = batch_gradients(kind(params, virtual_ranks, on_hosts(group, hosts)), bucket_bytes)
        counts = dict.fromkeys(range(virtual_ranks), pieces)
        return [step(exchange, params, spans, counts, group.rank, sparsely and i > 0) for i in range(3)]


@pytest.mark.parametrize("hosts", ["a", "ab", "aab"])
@pytest.mark.parametrize("sparsely", [False, True])
@pytest.mark.parametrize(
    ("virtual_ranks", "pieces", "bucket_bytes"), [(8, 1, 100), (8, 3, 2**20), (5, 1, 2**20), (7, 2, 600)]
)
def test_the_sum_is_that_of_the_tree(
    hosts: str, sparsely: bool, virtual_ranks: int, pieces: int, bucket_bytes: int
) -> None:
    counts = dict.fromkeys(range(virtual_ranks), pieces)
    first, later = (expected_gradients(virtual_ranks, counts, now) for now in (False, sparsely))
    for rank in run_ranks(run_batched, len(hosts), virtual_ranks, pieces, bucket_bytes, hosts, sparsely, False):
        assert rank == [first, later, later]


def steps_without_spans(world: World) -> Any:
    """Run steps in which no process knows its virtual ranks beforehand, with batched gradients and without."""
    results = []
    for batched in (False, True):
        with join(world) as group:
            params = parameters()
            exchange: TreeExchange = DynamicTree(params, 8, group)
            if batched:
                batch_gradients(exchange)
            exchange.begin((), dict.fromkeys(range(8), 1), lambda: torch.ones(8, dtype=torch.float64))
            for v in (3, 0, 1, 6, 2, 7, 4, 5):
                exchange.enter(v, last=False)
                sum((p * (v - 3.3) ** 7 + p.sin()).sum() for p in params).backward()  # type: ignore[union-attr]
                exchange.leave()
            exchange.launch()
            exchange.finish(8.0)
            results.append([p.grad.tolist() for p in params if p.grad is not None])
    return results


def test_steps_without_spans_have_the_same_sum() -> None:
    ((alone, batched),) = run_ranks(steps_without_spans, 1)
    assert alone == batched != []


def alone() -> tuple[TreeExchange, list[nn.Parameter]]:
    """Return an exchange on one process, in a step with one virtual rank of three micro-batches."""
    params = parameters()
    exchange = batch_gradients(TreeExchange(params, 2, ProcessGroup(0, 1, torch.device("cpu"))))
    exchange.begin([(0, 2)], {0: 3, 1: 1}, lambda: torch.ones(2, dtype=torch.float64))
    return exchange, params


def backward(params: list[nn.Parameter]) -> None:
    torch.stack([(p * 3).sum() for p in params]).sum().backward()


def test_gradients_can_be_read_after_each_backward() -> None:
    exchange, params = alone()
    for number in range(3):
        exchange.enter(0, last=False)
        backward(params)
        for p in params:
            assert p.grad is not None
            assert p.grad.eq(3 * (number + 1)).all()
        exchange.leave()


def double(p: nn.Parameter) -> None:
    assert p.grad is not None
    p.grad.mul_(2)


def replace(p: nn.Parameter) -> None:
    assert p.grad is not None
    p.grad = p.grad * 2


@pytest.mark.parametrize("change", [double, replace])
@pytest.mark.parametrize("uses_all", [True, False])
def test_a_changed_gradient_is_noticed(change: Callable[[nn.Parameter], None], uses_all: bool) -> None:
    """A bucket of which only a part is used waits until the micro-batch ends."""
    exchange, params = alone()
    exchange.enter(0, last=False)
    backward(params if uses_all else params[:2])
    change(params[1])
    with pytest.raises(LoopError, match="changed between two micro-batches"):
        exchange.leave()


def test_a_gradient_that_is_set_to_none_counts() -> None:
    exchange, params = alone()
    for _ in range(3):
        exchange.enter(0, last=False)
        backward(params[:2])
        for p in params:
            p.grad = None
        exchange.leave()
    exchange.enter(1, last=True)
    backward(params)
    exchange.leave()
    exchange.launch()
    exchange.finish(1.0)
    for number, p in enumerate(params):
        assert p.grad is not None
        assert p.grad.eq(12 if number < 2 else 3).all()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_are_recomputed_several_times(reentrant: bool) -> None:
    """Reentrant recomputation accumulates the gradient of a shared layer twice in one backward."""
    results = []
    for batched in (False, True):
        torch.manual_seed(0)
        layer = nn.Linear(4, 4)
        layout = BucketLayout(list(layer.parameters()), 1)
        layout.batched = [batched]
        ready, copy = BucketReadiness(layout), FlatGradient(layout)
        for _ in range(3):
            ready.begin()
            copy.clear()
            x = torch.randn(2, 4, generator=torch.Generator().manual_seed(1), requires_grad=True)
            ready.enter(copy, notify=False, last=True, launch=False)
            for _ in range(3):
                x = checkpoint(layer, x, use_reentrant=reentrant)
            x.square().sum().backward()
            ready.leave()
            assert not ready.touched
        results.append([view.tolist() for view in copy.views])
        ready.close()
    assert results[0] == results[1]


class Shared(nn.Module):
    """A model whose gradients share memory: `a` and `b` all of it, `c` and `d` are halves of one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
        self.c, self.d = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added = x @ (self.a.view(2, 2) + self.b.view(2, 2))
        joined: torch.Tensor = nn.functional.linear(x, torch.cat([self.c, self.d])).sum() + added.sum()
        return joined


@pytest.mark.parametrize("batched", [False, True])
def test_gradients_that_share_memory_are_added_once(batched: bool) -> None:
    """torch's own p.grad is wrong after the second backward of this model."""
    model, x = Shared(), torch.tensor([[1.0, 2.0]])
    params = list(model.parameters())
    exchange = TreeExchange(params, 4, ProcessGroup(0, 1, torch.device("cpu")))
    exchange.layout.batched = [batched]
    exchange.begin([(0, 4)], {0: 2, 1: 3, 2: 1, 3: 2}, lambda: torch.ones(4, dtype=torch.float64))
    for virtual_rank, count in {0: 2, 1: 3, 2: 1, 3: 2}.items():
        for _ in range(count):
            exchange.enter(virtual_rank, last=False)
            model(x).backward()
            exchange.leave()
    exchange.launch()
    exchange.finish(8.0)
    assert [p.grad.tolist() for p in params[:4] if p.grad is not None] == [[1, 1, 2, 2]] * 2 + [[[1, 2], [1, 2]]] * 2


@pytest.mark.parametrize("count", [1, 2, 3])
def test_one_process_adds_and_divides_shared_memory_once(count: int) -> None:
    model, x = Shared(), torch.tensor([[1.0, 2.0]])
    params = list(model.parameters())
    exchange = SingleProcess(params, 1, ProcessGroup(0, 1, torch.device("cpu")))
    for _ in range(2):
        exchange.begin([(0, 1)], {0: count}, lambda: torch.ones(1, dtype=torch.float64))
        for number in range(count):
            exchange.enter(0, last=number == count - 1)
            model(x).backward()
            exchange.leave()
        exchange.finish(3.0 * count)
        for p, expected in zip(params[:4], [[1, 1, 2, 2]] * 2 + [[[1, 2], [1, 2]]] * 2, strict=True):
            assert p.grad is not None
            torch.testing.assert_close(p.grad, torch.tensor(expected) / 3.0)
        exchange.zero()


def test_a_gradient_that_was_removed_before_another_backward_counts() -> None:
    """In one micro-batch, a part of the loss has a backward of its own, and the script removes its gradients."""
    results = []
    for batched in (False, True):
        params = parameters()
        layout = BucketLayout(params, 1)
        layout.batched = [batched] * len(layout.buckets)
        ready, copy = BucketReadiness(layout), FlatGradient(layout)
        ready.begin()
        ready.enter(copy, notify=False, last=True, launch=False)
        backward(params[:3])
        for p in params:
            p.grad = None
        (params[0] * 5).sum().backward()  # the other members of the bucket are not used
        ready.leave()
        copy.complete()
        results.append([view.tolist() for view in copy.views])
        ready.close()
    assert results[0] == results[1]
    assert results[1][0][0][0] == 8


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("model", [Shared()])
def test_shared_memory_and_recomputation(model: Shared) -> None:
    """Reentrant recomputation accumulates gradients that share a storage several times in one backward."""
    results = []
    for batched in (False, True):
        layout = BucketLayout(list(model.parameters()), 1)
        layout.batched = [batched]
        ready, copy = BucketReadiness(layout), FlatGradient(layout)
        ready.begin()
        ready.enter(copy, notify=False, last=True, launch=False)
        x = torch.tensor([[1.0, 2.0]], requires_grad=True)
        (checkpoint(model, x, use_reentrant=True) + checkpoint(model, x, use_reentrant=True)).backward()
        ready.leave()
        assert not ready.touched
        copy.complete()
        results.append([view.tolist() for view in copy.views])
        ready.close()
    assert results[0] == results[1]
    assert results[1][0] == [2, 2, 4, 4]
