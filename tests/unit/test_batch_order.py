"""Batch order and RNG keys: every sample once an epoch, on any assignment; keys are plain arithmetic."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import ceil
from typing import Any

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.scores import BIG, PRIMES, orders, quick
from unisono.plan.assignment import Slot, micro_batches_of
from unisono.plan.batch_order import BatchOrder, MicroBatchId, cut_batch
from unisono.plan.rng_keys import EVALUATE, INIT, ORDER, ROUND, STEP, UPDATE, mix, shuffled


def even(parts: list[int]) -> bool:
    return max(parts) - min(parts) <= 1


# -- order


@quick
@given(st.integers(0, 10_000), st.integers(1, 200))
def test_parts_cover_everything_once_and_are_even(count: int, hands: int) -> None:
    parts = [cut_batch(count, hands, hand) for hand in range(hands)]
    assert parts[0][0] == 0
    assert parts[-1][1] == count
    assert all(before[1] == after[0] for before, after in pairwise(parts))
    assert even([stop - start for start, stop in parts])


@quick
@given(st.integers(0, 500), st.integers(1, 128), st.integers(1, 128))
def test_a_span_of_parts_gets_an_even_share(count: int, hands: int, neighbors: int) -> None:
    """Larger parts are spread, so two spans of equal width differ by one item at most."""
    neighbors = min(neighbors, hands)
    widths = [
        cut_batch(count, hands, i + neighbors - 1)[1] - cut_batch(count, hands, i)[0]
        for i in range(hands - neighbors + 1)
    ]
    assert even(widths)


@quick
@given(orders, st.integers(0, 3))
@example(BatchOrder(length=31, batch=7, virtual_ranks=3, micro_batch=2), 1)
@example(BatchOrder(length=1, batch=1, virtual_ranks=128), 0)
@example(
    BatchOrder(length=129, batch=128, virtual_ranks=128, micro_batch=1), 0
)  # a tail of one sample: 127 virtual ranks are empty
@example(BatchOrder(length=509, batch=127, virtual_ranks=61, micro_batch=2), 2)
def test_every_sample_exactly_once_an_epoch(order: BatchOrder, epoch: int) -> None:
    steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
    assert {order.epoch(step) for step in steps} == {epoch}
    seen = [
        sample for step in steps for _, samples in order.places(step, (0, order.virtual_ranks)) for sample in samples
    ]
    assert sorted(seen) == list(range(order.length))
    assert seen == order.permutation(epoch).tolist()  # and in the epoch's order, batch after batch


@quick
@given(orders, st.data())
def test_the_micro_batches_of_a_step_make_up_its_batch(order: BatchOrder, data: st.DataObject) -> None:
    step = data.draw(st.integers(0, 3 * order.steps_per_epoch))
    start, stop = order.batch_bounds(step)
    batch = order.permutation(order.epoch(step))[start:stop].tolist()
    rest = order.length % order.batch
    is_tail = (step + 1) % order.steps_per_epoch == 0 and rest > 0
    assert len(batch) == order.batch_size(step) == (rest if is_tail else min(order.batch, order.length))

    micro = [order.micro_batches(step, v) for v in range(order.virtual_ranks)]
    assert [sample for share in micro for piece in share for sample in piece] == batch
    assert even([sum(map(len, share)) for share in micro])
    for v, share in enumerate(micro):
        assert all(share), "no micro-batch is empty"
        if share:
            pieces = [len(piece) for piece in share]
            assert even(pieces)
            least = 1 if order.micro_batch is None else ceil(sum(pieces) / order.micro_batch)
            assert len(pieces) == least  # no more micro-batches than the limit requires
        assert [b - a for a, b in order.micro_bounds(step, v)] == [len(piece) for piece in share]


@quick
@given(orders, st.integers(0, 50), st.data())
def test_the_samples_of_a_virtual_rank_do_not_depend_on_its_process(
    order: BatchOrder, step: int, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, order.virtual_ranks), max_size=6)))
    bounds = [0, *cuts, order.virtual_ranks]
    parts = [list(order.places(step, span)) for span in pairwise(bounds)]
    whole = list(order.places(step, (0, order.virtual_ranks)))
    assert [entry for part in parts for entry in part] == whole
    assert len({where for where, _ in whole}) == len(whole)
    for where, _ in whole:
        assert isinstance(where, MicroBatchId)
        assert where.step == step


def test_the_order_is_a_pure_function_of_seed_and_epoch() -> None:
    def order(**changed: Any) -> BatchOrder:
        return BatchOrder(**{"length": 97, "batch": 8, "virtual_ranks": 8, "seed": 1, **changed})

    here = order().permutation(0).tolist()
    assert here == order().permutation(0).tolist()
    assert here == order(batch=5, virtual_ranks=3, micro_batch=1).permutation(0).tolist()
    assert here != order(seed=2).permutation(0).tolist()
    assert here != order().permutation(1).tolist()
    assert order(shuffle=False).permutation(4).tolist() == list(range(97))


def test_the_example_in_the_docstring() -> None:
    order = BatchOrder(length=31, batch=7, virtual_ranks=3, micro_batch=2)
    assert [[b - a for a, b in order.micro_bounds(0, v)] for v in range(3)] == [[2], [2], [1, 2]]
    assert order.steps_per_epoch == 5
    assert order.batch_size(4) == 3


# -- keys


def test_golden_keys() -> None:
    """If one of these numbers changes, every run gets another order of samples and other dropout."""
    assert (ORDER, ROUND, INIT, EVALUATE, STEP, UPDATE) == (1, 2, 3, 4, 5, 6)
    assert mix() == 0
    assert mix(0) == 0xE220A8397B1DCDAF
    assert mix(1, 2, 3) == 0xD0734750FDE362B3
    assert mix(17, INIT, 1234, 0, 5, 2) == 0x6442EA44F03A40CD
    assert mix(-1) == mix(BIG - 1) == 0xE4D971771B652C20
    assert shuffled(10, mix(0, ORDER, 0)).tolist() == [1, 6, 5, 4, 8, 3, 7, 9, 2, 0]


def test_mix_is_splitmix64() -> None:
    """Vigna's reference: the first output of splitmix64 from state 0 is e220a8397b1dcdaf."""
    assert mix(0) == 0xE220A8397B1DCDAF


def test_the_shuffle_sorts_by_the_same_mixer() -> None:
    for length, key in [(1, 0), (2, 5), (1000, mix(3, ORDER, 7)), (257, BIG - 1)]:
        assert shuffled(length, key).tolist() == sorted(range(length), key=lambda i: mix(i ^ key))


@quick
@given(st.lists(st.integers(-BIG, BIG), max_size=6), st.lists(st.integers(-BIG, BIG), max_size=6))
def test_keys_are_64_bit_and_differ_for_different_coordinates(a: list[int], b: list[int]) -> None:
    assert 0 <= mix(*a) < BIG
    assert mix(*a) == mix(*a)
    if len(a) == len(b) and [x % BIG for x in a] != [x % BIG for x in b]:
        assert mix(*a) != mix(*b)


def test_adjacent_keys_are_unrelated() -> None:
    purposes, steps, micro = (ORDER, ROUND, INIT, EVALUATE, STEP, UPDATE), range(50), range(16)
    every = {mix(seed, p, s, m) for seed in range(3) for p in purposes for s in steps for m in micro}
    assert len(every) == 3 * len(purposes) * 50 * 16
    for key in list(every)[:2000]:
        assert key.bit_length() > 32  # not a small number in disguise
    # one bit of the step flips half of the key's bits, on average
    flips = [(mix(9, ROUND, s, 0) ^ mix(9, ROUND, s ^ (1 << bit), 0)).bit_count() for s in steps for bit in range(20)]
    assert 31 < sum(flips) / len(flips) < 33


def test_a_shuffle_is_a_permutation_that_looks_random() -> None:
    for length in PRIMES:
        assert sorted(shuffled(length, 42).tolist()) == list(range(length))
    firsts = [int(shuffled(8, mix(seed, ORDER, 0))[0]) for seed in range(4000)]
    counts = np.bincount(firsts, minlength=8)
    assert counts.min() > 400
    assert counts.max() < 600  # 500 each, give or take 21


# -- shards


@quick
@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=40).filter(any),
    st.integers(1, 150),
    st.integers(0, 3),
    st.data(),
)
def test_in_a_window_no_sample_moves_further(counts: list[int], window: int, epoch: int, data: st.DataObject) -> None:
    def order(window: int) -> BatchOrder:
        return BatchOrder(length=sum(counts), batch=7, virtual_ranks=3, seed=epoch, shards=tuple(counts), window=window)

    walk, turned = order(window).permutation(epoch), order(1).permutation(epoch)
    assert sorted(walk.tolist()) == list(range(sum(counts)))
    place = np.argsort(turned)  # of every sample, where only the shards were shuffled
    assert np.abs(place[walk] - np.arange(len(walk))).max() < window
    shard = np.repeat(np.arange(len(counts)), counts)
    assert sum(a != b for a, b in pairwise(shard[turned])) == sum(map(bool, counts)) - 1  # each shard in one piece
    assert all(b == a + 1 for a, b in pairwise(turned.tolist()) if shard[a] == shard[b])
    start = data.draw(st.integers(0, len(walk)))
    stop = data.draw(st.integers(start, len(walk)))
    assert order(window).part(epoch, start, stop).tolist() == walk[start:stop].tolist()


def test_a_window_shuffles_over_the_borders_of_blocks() -> None:
    order = BatchOrder(length=60_000, batch=7, virtual_ranks=3, shards=(20_000,) * 3, window=300)
    walk = order.permutation(0)
    moved = np.abs(np.argsort(order.permutation(0)) - np.argsort(replace(order, window=1).permutation(0)))
    assert sorted(walk.tolist()) == list(range(60_000))
    assert moved.max() < 300
    assert moved[4096 * 3 - 50 : 4096 * 3 + 50].mean() > 50  # as much there as elsewhere
    assert replace(order, shuffle=False).permutation(3).tolist() == list(range(60_000))
    assert order.permutation(1).tolist() != walk.tolist()


@given(st.integers(0, 40), st.integers(1, 6))
def test_processes_that_take_turns_compute_equally_many_micro_batches(count: int, turns: int) -> None:
    places = [(MicroBatchId(3, i // 2, i % 2), [i]) for i in range(count)]
    each = [list(micro_batches_of(places, Slot(0, turn, turns))) for turn in range(turns)]
    assert len({len(mine) for mine in each}) == 1
    rounds = [pair for row in zip(*each, strict=True) for pair in row]
    assert [pair for pair in rounds if not pair[0].spare] == places, "in their order, round by round"
    assert all(samples == places[-1][1] for place, samples in rounds if place.spare)
    assert len(rounds) - count < turns
