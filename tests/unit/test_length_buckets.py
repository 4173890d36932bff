"""Batches of similar length: every sample once an epoch, little padding, and nothing but lengths, seed and epoch."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.scores import quick
from unisono.plan.batch_order import BatchOrder
from unisono.plan.ordering.length_buckets import POOL

some_lengths = st.lists(st.integers(0, 50), min_size=1, max_size=400)


def padding(order: BatchOrder, lengths: Sequence[int]) -> float:
    """Return the part of the first epoch's batches that is padding."""
    found = [0, 0]
    for step in range(order.steps_per_epoch):
        for virtual_rank in range(order.virtual_ranks):
            for samples in order.micro_batches(step, virtual_rank):
                sizes = [lengths[sample] for sample in samples]
                found[0] += max(sizes) * len(sizes)
                found[1] += sum(sizes)
    return 1 - found[1] / found[0]


@quick
@given(some_lengths, st.integers(1, 60), st.integers(0, 3))
def test_every_sample_is_once_in_an_epoch(lengths: list[int], batch: int, epoch: int) -> None:
    order = BatchOrder(length=len(lengths), batch=batch, virtual_ranks=4, lengths=tuple(lengths))
    assert sorted(order.permutation(epoch).tolist()) == list(range(len(lengths)))


@quick
@given(some_lengths, st.integers(1, 60))
def test_a_full_batch_is_a_range_of_the_lengths_of_its_pool(lengths: list[int], batch: int) -> None:
    """Within a pool the batches do not overlap: one ends where the next one begins."""
    order = BatchOrder(length=len(lengths), batch=batch, virtual_ranks=1, lengths=tuple(lengths))
    full = len(lengths) // batch
    if full <= POOL:
        bounds = []
        for step in range(full):
            sizes = [lengths[i] for i in order.micro_batches(step, 0)[0]]
            assert sizes == sorted(sizes)
            bounds.append((sizes[0], sizes[-1]))
        bounds.sort()
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(bounds))


def test_batches_need_little_padding() -> None:
    chance = random.Random(1)
    lengths = tuple(chance.randrange(1, 60) for _ in range(5000))
    shuffled = BatchOrder(length=5000, batch=64, virtual_ranks=8)
    assert padding(shuffled, lengths) > 0.3
    assert padding(replace(shuffled, lengths=lengths), lengths) < 0.01


def test_the_order_follows_from_lengths_seed_and_epoch() -> None:
    lengths = tuple(i % 7 for i in range(100))
    order = BatchOrder(length=100, batch=8, virtual_ranks=8, seed=1, lengths=lengths)
    here = order.permutation(0).tolist()
    assert here == replace(order, virtual_ranks=3, micro_batch=1).permutation(0).tolist()
    assert here != order.permutation(1).tolist()
    assert here != replace(order, seed=2).permutation(0).tolist()
    assert here != replace(order, lengths=tuple(i % 5 for i in range(100))).permutation(0).tolist()
    assert [order.permutation(epoch).tolist() for epoch in (3, 2, 1, 0)][3] == here


def test_batches_come_in_another_order_than_their_lengths() -> None:
    lengths = tuple(range(400))
    order = BatchOrder(length=400, batch=10, virtual_ranks=1, lengths=lengths)
    firsts = [order.micro_batches(step, 0)[0][0] for step in range(40)]
    assert sorted(firsts) == list(range(0, 400, 10))
    assert firsts != sorted(firsts)
