"""The collectives for scripts on trees of tensors: results for every dtype, and error messages."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch

from unisono.distributed.collectives import Collectives
from unisono.distributed.init import join_process_group as join
from unisono.environment import World
from unisono.errors import LoopError
from unisono.testing import run_ranks

Pair = namedtuple("Pair", "x y")

KINDS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
KINDS += [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


def of(rank: int) -> dict[str, Any]:
    """Return a nested tree of all dtypes, with an empty tensor, a scalar, and one that is not contiguous."""
    g = torch.Generator().manual_seed(rank)
    kinds = {str(kind): torch.randint(0, 2, (3,), generator=g).to(kind) for kind in KINDS}
    numbers = torch.randn(4, 5, generator=g)
    return {"z": kinds, "pair": Pair(numbers.t(), [torch.tensor(float(rank))]), "none": torch.empty(0, 7), "a": ()}


def same(one: Any, other: Any) -> bool:
    """Return whether two trees have the same form, the same order of names, and the same numbers."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bool(torch.equal(one.cpu(), other.cpu()))
    if type(one) is not type(other) or len(one) != len(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    return all(map(same, one, other))


def moved(world: World) -> list[str]:
    """Return the wrong results of collectives that move trees."""
    wrong: list[str] = []

    def expect(name: str, got: Any, wanted: Any) -> None:
        if not (got is wanted is None or same(got, wanted)):
            wrong.append(f"{name}: {got}")

    with join(world) as group:
        c, n, rank = Collectives(group), group.size, group.rank
        all_trees = [of(r) for r in range(n)]
        mine, last = all_trees[rank], n - 1
        expect("all_gather", c.all_gather(mine), all_trees)
        expect("gather", c.gather(mine, to=last), all_trees if rank == last else None)
        plain = {"x": torch.arange(5), "y": (torch.ones(2, dtype=torch.int16), torch.tensor(True))}
        expect("broadcast", c.broadcast(plain if rank == last else None, source=last), plain)
        expect("broadcast keeps the source's own", c.broadcast(mine, source=rank) if n == 1 else mine, mine)
        for by in (1, -1, 2, n):
            expect(f"shift {by}", c.shift(mine, by), all_trees[(rank - by) % n])
        trees = [{"rows": torch.full((rank + 2 * p, 3), 10.0 * rank + p), "n": torch.tensor(p)} for p in range(n)]
        came = [{"rows": torch.full((r + 2 * rank, 3), 10.0 * r + rank), "n": torch.tensor(rank)} for r in range(n)]
        expect("all_to_all", c.all_to_all(trees), came)
        unlike = [[torch.arange(p)] * p for p in range(n)]
        expect("scatter", c.scatter(unlike if rank == last else None, source=last), unlike[rank])
        for value in ({"a": [1, 2.5, None]}, "x" * 5000):
            assert c.all_gather_object([rank, value]) == [[r, value] for r in range(n)]
            assert c.gather_object(value) == ([value] * n if rank == 0 else None)
            assert c.broadcast_object([rank, value], source=last) == [last, value]
        c.barrier()
    return wrong


@pytest.mark.parametrize("size", [1, 2, 3])
def test_trees_of_every_dtype_are_moved_unchanged(size: int) -> None:
    assert run_ranks(moved, size) == [[]] * size


def folded(world: World) -> list[str]:
    """Return the wrong results of collectives that reduce trees."""
    wrong: list[str] = []

    def expect(name: str, got: Any, wanted: Any) -> None:
        if not same(got, wanted):
            wrong.append(f"{name}: {got}, and not {wanted}")

    with join(world) as group:
        c, n, rank = Collectives(group), group.size, group.rank
        kinds = [kind for kind in KINDS if kind is not torch.bool]
        all_trees = [{str(k): (torch.arange(7) + 3 * r).to(k) for k in kinds} | {"no": torch.ones(0)} for r in range(n)]
        mine, last = all_trees[rank], n - 1
        total = all_trees[0]
        for other in all_trees[1:]:  # in the order of ranks, in the dtype of the tensors
            total = {name: total[name] + other[name] for name in total}
        expect("all_reduce", c.all_reduce(mine), total)
        expect("ring_all_reduce", c.ring_all_reduce(mine), total)  # small integers: no rounding
        found = c.reduce(mine, to=last)
        expect("reduce", found if rank == last else total, total)
        assert (found is None) == (rank != last)
        real = {name: row for name, row in mine.items() if row.is_floating_point()}
        expect("mean", c.all_reduce(real, "mean"), {name: total[name] / n for name in real})
        expect("max", c.all_reduce(torch.tensor([rank, -rank]), "max"), torch.tensor([last, 0]))
        expect("min", c.all_reduce(torch.tensor([rank, -rank]), "min"), torch.tensor([0, -last]))
        expect("any", c.all_reduce(torch.tensor([rank == 0, False]), "max"), torch.tensor([True, False]))
        parts = [(torch.full((p + 1,), float(rank)), torch.tensor([rank])) for p in range(n)]
        whole = n * last / 2
        expect("reduce_scatter", c.reduce_scatter(parts), (torch.full((rank + 1,), whole), torch.tensor([int(whole)])))
        assert mine["torch.int64"].tolist() == (torch.arange(7) + 3 * rank).tolist()  # the arguments are not changed
        grown = torch.ones(2, requires_grad=True)
        assert not c.all_reduce(grown).requires_grad
    return wrong


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sums_are_added_in_the_order_of_ranks(size: int) -> None:
    assert run_ranks(folded, size) == [[]] * size


MEDIAN: Any = "median"

WRONG: list[tuple[Callable[[Collectives], Any], list[str]]] = [
    (
        lambda c: c.all_gather({"a": [torch.ones(3 + (c.rank == 1), 2)]}),
        [
            "all_gather was called with different arguments",
            "Rank 0 has float32 [3, 2], rank 1 float32 [4, 2] (at ['a'][0])",
            "pad shorter",
        ],
    ),
    (
        lambda c: c.all_reduce(torch.ones(3, dtype=torch.float64 if c.rank else torch.float32)),
        ["Rank 0 has float32 [3], rank 1 float64 [3]"],
    ),
    (
        lambda c: c.all_reduce({"a": torch.ones(1)} if c.rank else {"a": torch.ones(1), "b": torch.ones(1)}),
        ["rank 1 nothing (at ['b'])"],
    ),
    (lambda c: c.all_reduce(torch.ones(1), "max" if c.rank else "sum"), ["Rank 0 has sum, rank 1 max"]),
    (
        lambda c: c.barrier() if c.rank else c.all_gather(torch.ones(1)),
        ["Rank 0 called all_gather, rank 1 called barrier"],
    ),
    (lambda c: c.all_gather({"loss": 1.0 if c.rank else torch.ones(())}), ["Rank 1: ", "one thing is a float"]),
    (lambda c: c.all_gather({"loss": 1.0}), ["one thing is a float", "torch.tensor(value)"]),
    (lambda c: c.all_reduce(torch.ones(1), MEDIAN), ["op is median; it must be one of sum, mean, max, min"]),
    (lambda c: c.all_reduce(torch.ones(1, dtype=torch.int64), "mean"), ["Integers have no mean"]),
    (lambda c: c.all_reduce(torch.ones(1, dtype=torch.bool)), ["have no sum", 'op="max"']),
    (lambda c: c.gather(torch.ones(1), to=2), ["The rank is 2; ranks are 0 to 1"]),
    (lambda c: c.scatter([torch.ones(1)] if c.rank == 0 else None), ["scatter", "a list of 2 trees", "list of 1"]),
    (lambda c: c.all_to_all([torch.ones(1, 2 + (p > c.rank)) for p in range(2)]), ["Rank 0 has", "[None, 2]"]),
    (lambda c: c.broadcast(torch.eye(2).to_sparse() if c.rank == 0 else None), ["dense tensors", "to_dense()"]),
    (
        lambda c: c.all_gather_object(object() if c.rank else 1),
        ["Rank 1: ", "Object of type object is not JSON serializable"],
    ),
    (lambda c: c.broadcast_object({1, 2}, source=0), ["Object of type set is not JSON serializable"]),
]


def attempts(world: World) -> list[str]:
    messages = []
    with join(world) as group:
        c = Collectives(group)
        for call, _ in WRONG:
            try:
                messages.append(str(call(c)))
            except LoopError as error:
                messages.append(str(error))
        assert c.all_reduce(torch.ones(1)).item() == group.size  # collectives work after an error
    return messages


def test_invalid_arguments_raise_on_all_processes() -> None:
    for messages in run_ranks(attempts, 2):
        for message, (_, parts) in zip(messages, WRONG, strict=True):
            assert "Next: " in message, message
            assert all(part in message for part in parts), message
