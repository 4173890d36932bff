"""Mixtures: how often each source is drawn, which of its samples, and weights that change."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, TensorDataset

from tests.shards import write_lines
from unisono.data.mixture import Mixture
from unisono.data.prepared import layout_of, mixing_of
from unisono.data.streaming.stream import Stream
from unisono.distributed.init import join_process_group as join
from unisono.environment import World
from unisono.errors import DataError
from unisono.plan.batch_order import BatchOrder
from unisono.plan.mixing.draw_counts import UNIT, DrawCounts, WeightFunction, WeightTable, whole_weights


class Named(Dataset[tuple[str, int]]):
    """Samples that know which they are."""

    def __init__(self, name: str, length: int) -> None:
        self.name, self.length = name, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> tuple[str, int]:
        return self.name, number


def order_of(data: Mixture, **more: Any) -> BatchOrder:
    layout = layout_of(data)
    given = {"batch": 7, "virtual_ranks": 3, "micro_batch": 2, "seed": 5} | more
    return BatchOrder(length=layout.length, mixing=mixing_of(data), **given)


def batch(order: BatchOrder, data: Mixture, step: int) -> list[tuple[str, int]]:
    parts = [order.micro_batches(step, v) for v in range(order.virtual_ranks)]
    return [sample for part in parts for numbers in part for sample in data.__getitems__(numbers)]


ABC = {"a": Named("a", 50), "b": Named("b", 9), "c": Named("c", 30)}
WEIGHTS = {"a": 5, "b": 3, "c": 2}


def test_sources_are_drawn_by_weight_and_every_sample_equally_often() -> None:
    data = Mixture(ABC, WEIGHTS)
    order, seen = order_of(data), Counter[tuple[str, int]]()
    for step in range(200):
        seen.update(batch(order, data, step))
    total = order.samples(200)
    for name, source in ABC.items():
        times = [seen[name, number] for number in range(len(source))]
        assert abs(sum(times) - total * WEIGHTS[name] / 10) <= 2
        assert max(times) - min(times) <= 1  # a source begins again when it is over


def test_a_step_does_not_depend_on_what_was_asked_before() -> None:
    table = {0: [1.0, 1, 1], 3: [0, 1.0, 1], 11: [9.0, 0, 1]}
    for weights in (table, lambda step: [step + 1.0, 3.0, 1.0 / (step + 1)]):
        data = Mixture(ABC, weights)
        order = order_of(data)
        forward = [batch(order, data, step) for step in range(40)]
        for step in (39, 0, 17, 16, 3, 38):
            assert batch(order_of(data), data, step) == forward[step]
        again = order_of(data)
        assert [batch(again, data, step) for step in reversed(range(40))] == forward[::-1]


def test_virtual_ranks_and_micro_batches_do_not_change_a_batch() -> None:
    data = Mixture(ABC, WEIGHTS)
    for step in (0, 12, 30):
        batches = [batch(order_of(data, virtual_ranks=v, micro_batch=m), data, step) for v, m in ((1, 7), (5, 1))]
        assert batches[0] == batches[1]


def test_epochs_of_a_source_differ_and_seeds_too() -> None:
    data = Mixture({"a": ABC["a"]}, [1.0])
    order = order_of(data, batch=50)
    assert sorted(batch(order, data, 0)) == sorted(batch(order, data, 1)) == [("a", i) for i in range(50)]
    assert batch(order, data, 0) != batch(order, data, 1) != batch(order_of(data, batch=50, seed=6), data, 1)
    unshuffled = order_of(data, batch=50, shuffle=False)
    assert batch(unshuffled, data, 3) == [("a", i) for i in range(50)]


def test_a_table_changes_at_its_steps() -> None:
    data = Mixture(ABC, {0: {"a": 1}, 4: {"b": 1, "c": 1}, 6: {"c": 1}})
    order = order_of(data)
    names = [Counter(name for name, _ in batch(order, data, step)) for step in range(8)]
    assert names[:4] == [{"a": 7}] * 4
    assert names[4] + names[5] == {"b": 7, "c": 7}
    assert names[6:] == [{"c": 7}] * 2


def test_a_function_and_a_table_of_the_same_weights_agree() -> None:
    rows = {0: [3.0, 1, 1], 10: [1.0, 1, 7], 25: [0.0, 1, 1]}
    table, function = Mixture(ABC, rows), Mixture(ABC, lambda step: rows[max(s for s in rows if s <= step)])
    ours, theirs = order_of(table), order_of(function)
    assert [batch(ours, table, i) for i in range(40)] == [batch(theirs, function, i) for i in range(40)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 1000), min_size=4, max_size=4).filter(any), min_size=1, max_size=30),
    st.integers(1, 9),
)
def test_counts_follow_the_sum_of_the_weights(rows: Sequence[Sequence[int]], size: int) -> None:
    """Every step draws exactly its batch, no source fewer than 0, and the sums follow those of the weights."""
    whole = [whole_weights(row) for row in rows]
    counts = DrawCounts(4, WeightFunction(whole.__getitem__), lambda step: step * size)
    before = [counts.before(step) for step in range(len(rows) + 1)]
    for step, (now, after) in enumerate(pairwise(before)):
        drawn = [b - a for a, b in zip(now, after, strict=True)]
        assert sum(drawn) == size
        assert min(drawn) >= 0
        assert all(n == 0 for n, weight in zip(drawn, whole[step], strict=True) if weight == 0)
    wanted = np.cumsum([np.array(row) / sum(row) * size for row in whole], axis=0)
    error = np.abs(np.array(before[1:]) - wanted)
    assert error.max() < 1.6 + len(rows)
    if all(row == rows[0] for row in rows):
        assert error.max() < 1.1


def test_late_steps_are_quick_and_the_same() -> None:
    """A resume late in a run adds up the steps before; a table jumps."""
    table = WeightTable((0, 1000), (whole_weights([1, 3]), whole_weights([3, 1])))
    calls: list[int] = []

    def weights(step: int) -> tuple[int, ...]:
        calls.append(step)
        return table.at(step)

    function = DrawCounts(2, WeightFunction(weights), lambda step: 10 * step)
    jumped = DrawCounts(2, table, lambda step: 10 * step)
    assert function.before(9000) == jumped.before(9000) == (2500 + 60000, 7500 + 20000)
    assert len(calls) == 9000
    assert function.before(8500) == jumped.before(8500)
    assert len(calls) < 9000 + 1024
    far = jumped.before(10**12)
    assert far == (7_499_999_995_000, 2_500_000_005_000)


def test_weights_become_whole_numbers() -> None:
    assert whole_weights([2, 2]) == (UNIT // 2, UNIT // 2)
    assert whole_weights([1e300, 1e300, 0]) == (UNIT // 2, UNIT // 2, 0)
    for wrong in ([1, -1], [0, 0], [float("nan")], [float("inf"), 1], []):
        with pytest.raises(ValueError):
            whole_weights(wrong)


def test_streams_keep_their_windows_in_a_mixture(tmp_path: Path) -> None:
    stream = Stream.json_lines(write_lines(tmp_path), window=4)
    data = Mixture([stream, TensorDataset(torch.arange(8))], [3, 1])
    with join(World()) as group:
        data.prepare(group, "stop", lambda text: None)
    order = order_of(data)
    numbers = [n for step in range(3) for v in range(3) for part in order.micro_batches(step, v) for n in part]
    ours = [number for number in numbers if number < len(stream)]
    alone = BatchOrder(length=25, batch=25, virtual_ranks=1, shards=stream.layout().shards, window=4)
    assert sorted(ours) == sorted(set(ours))
    assert len(alone.permutation(0)) == 25
    assert data[3]["cls"] == 3
    assert data[25 + 5] == (torch.tensor(5),)
    assert data.name_of(3).endswith("part-0.jsonl[3]")
    assert data.name_of(30) == "the source 1, sample 5"


def test_every_sample_once_without_weights() -> None:
    data = Mixture(ABC, WEIGHTS)
    assert data.__getitems__([0, 49, 50, 88, 59]) == [("a", 0), ("a", 49), ("b", 0), ("c", 29), ("c", 0)]
    assert len(data) == 89


def damaged(folder: Path) -> Stream:
    (folder / "x.jsonl").write_text("1\nno\n3\n")
    return Stream.json_lines(folder / "x.jsonl")


def test_damaged_samples_of_a_source(tmp_path: Path) -> None:
    data = Mixture({"good": Named("good", 3), "bad": damaged(tmp_path)}, [1, 1])
    with join(World()) as group:
        data.prepare(group, "skip", lambda text: None)
        assert data.__getitems__([0, 4, 5]) == [("good", 0), 3]
        with pytest.raises(DataError, match=r"All 1 samples.*\n.*the source bad, .*x.jsonl\[1\]"):
            data.__getitems__([4])
        data.prepare(group, "stop", lambda text: None)
        with pytest.raises(DataError, match="Sample 1 of the shard"):
            data.__getitems__([0, 4])


@pytest.mark.parametrize(
    ("sources", "weights", "message"),
    [
        ({}, {}, "at least one source"),
        (ABC, {"a": 1, "web": 1}, "no source 'web'"),
        (ABC, [1, 1], "There are 2 weights"),
        (ABC, [1, -1, 1], "A weight is -1"),
        (ABC, {"a": 0}, r"The sum of the weights is 0"),
        (ABC, {5: [1, 1, 1]}, "must begin at step 0"),
        (ABC, {0: [1, 1, 1], 7: {"d": 1}}, "'d', but a weight of it from step 7 on"),
        (ABC, {"a": "much"}, "could not convert"),
        ({"a": 5}, [1], "The source a of a mixture is not a map-style data set"),
        ({"a": Mixture(ABC, WEIGHTS)}, [1], "A mixture cannot be a source"),
        ({"a": Named("a", 0), "b": ABC["b"]}, [1, 1], "The source a of a mixture has no samples"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_wrong_mixture_is_refused(sources: Any, weights: Any, message: str) -> None:
    with join(World()) as group, pytest.raises(DataError, match=message):
        Mixture(sources, weights).prepare(group, "stop", lambda text: None)


def ramp(step: int) -> list[float]:
    return [1.0, step, 1.0]


def test_a_mixture_can_be_sent_to_another_process() -> None:
    for weights in (WEIGHTS, ramp):
        data = Mixture(ABC, weights)
        copy = pickle.loads(pickle.dumps(data))
        assert batch(order_of(copy), copy, 9) == batch(order_of(data), data, 9)
        assert copy.shape == data.shape


def test_wrong_weights_of_a_function_name_the_step() -> None:
    data = Mixture(ABC, lambda step: [1, 1, 3 - step])
    order = order_of(data)
    batch(order, data, 3)
    with pytest.raises(DataError, match="at step 4"):
        batch(order, data, 4)


def test_the_description_depends_on_everything_that_the_order_does() -> None:
    shapes = [
        Mixture(ABC, WEIGHTS).shape,
        Mixture(ABC, {**WEIGHTS, "a": 4}).shape,
        Mixture(ABC, {0: WEIGHTS, 100: {"a": 1}}).shape,
        Mixture({**ABC, "c": Named("c", 31)}, WEIGHTS).shape,
        Mixture(ABC, lambda step: [5, 3, 2]).shape,
        Mixture(ABC, lambda step: [5, 3, 2 + (step > 1000)]).shape,
    ]
    assert len(set(shapes)) == len(shapes)
    assert Mixture(ABC, {"a": 10, "b": 6, "c": 4}).shape == shapes[0]
    rows = [[5, 3, 2]] * 10  # as long as the run
    assert Mixture(ABC, rows.__getitem__).shape not in shapes
