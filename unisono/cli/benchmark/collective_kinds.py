"""The collectives that `unisono bench` measures, by name. This module needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple


class BenchmarkKind(NamedTuple):
    """A collective.

    Args:
        meaning: what each process receives.
        bus: the ratio of bus bandwidth to algorithm bandwidth for n processes, as in PERFORMANCE.md of nccl-tests.
    """

    meaning: str
    bus: Callable[[int], float]


def _all(n: int) -> float:
    return 2 * (n - 1) / n


def _half(n: int) -> float:
    return (n - 1) / n


def _one(n: int) -> float:
    return 1.0


KINDS: Mapping[str, BenchmarkKind] = {
    "all_reduce": BenchmarkKind("the sum, by the algorithm of gloo or NCCL", _all),
    "ring": BenchmarkKind("the sum, by sends and receives around a ring", _all),
    "tree": BenchmarkKind("the mean, by the default exchange of a run", _all),
    "tree_messages": BenchmarkKind("the mean, without shared memory, as between hosts", _all),
    "all_gather": BenchmarkKind("the parts of all processes", _half),
    "reduce_scatter": BenchmarkKind("its part of the sum", _half),
    "broadcast": BenchmarkKind("the tensor of one process", _one),
    "all_to_all": BenchmarkKind("a part from each process", _half),
    "send_receive": BenchmarkKind("the tensor of the left neighbor", _one),
}
