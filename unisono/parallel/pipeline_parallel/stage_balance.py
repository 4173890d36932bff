"""Divide a row of modules into stages so that the most expensive stage is as cheap as possible. Numbers only.

costs      3   1   1   1   3   3         two stages: [3 1 1 1] and [3 3], since of two stages one
starts     0               4             costs at least 6
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class BalancedRow(NamedTuple):
    """The links of a partition, in order.

    Attributes:
        costs: The cost of each link, in any unit.
        trains: Whether it has parameters that train. Every stage needs such a link.
        widths: The number of tensors that are sent where it starts a stage.
    """

    costs: Sequence[int]
    trains: Sequence[bool]
    widths: Sequence[int]


def balanced_partition(row: BalancedRow, stages: int, tolerance: float = 0.0) -> list[int]:
    """Return the number of the link with which each stage starts.

    There must be at least as many links that train as stages.

    Args:
        row: The links.
        stages: The number of stages.
        tolerance: Partitions whose most expensive stage costs at most this share above the least count as equal,
            because measured times are not more exact than that. The partition that sends the fewest tensors is chosen
            from these, and the most even one if several send equally few.
    """
    least, _ = _search(row, stages, None)
    return _search(row, stages, int(least[0] * (1 + tolerance)))[1]


def _search(row: BalancedRow, stages: int, limit: int | None) -> tuple[tuple[int, int], list[int]]:
    """Return the score of the best partition, and the partition.

    Without a limit on the cost of a stage, the score is (the most expensive stage, 0). With a limit it is (tensors that
    are sent, the sum of squared costs). Both only grow from stage to stage, so the best partition of the first links is
    part of the best partition of all.
    """
    count = len(row.costs)
    costs, trained = [0, *accumulate(row.costs)], [0, *accumulate(map(int, row.trains))]
    best: dict[int, tuple[tuple[int, int], list[int]]] = {0: ((0, 0), [])}  # by the next link
    for _ in range(stages):
        longer: dict[int, tuple[tuple[int, int], list[int]]] = {}
        for first, ((a, b), starts) in best.items():
            for end in range(first + 1, count + 1):
                cost = costs[end] - costs[first]
                if limit is not None and cost > limit:
                    break
                if trained[end] == trained[first]:
                    continue
                score = (max(a, cost), 0) if limit is None else (a + row.widths[first], b + cost * cost)
                if end not in longer or score < longer[end][0]:
                    longer[end] = score, [*starts, first]
        best = longer
    return best[count]
