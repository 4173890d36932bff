"""Where a row of links is cut into stages, so that the dearest stage is as cheap as it can be. Numbers only.

costs      3   1   1   1   3   3         two stages: [3 1 1 1] and [3 3], since 6 is the least that the dearer
begins     0               4             one of two can cost
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class BalancedRow(NamedTuple):
    """The links of a chain, in order.

    costs   what each of them costs, in any unit
    trains  has it parameters that train? Every stage needs such a link
    widths  how many tensors cross where it begins
    """

    costs: Sequence[int]
    trains: Sequence[bool]
    widths: Sequence[int]


def balanced_partition(row: BalancedRow, stages: int, alike: float = 0.0) -> list[int]:
    """The number of the link with which each stage begins.

    alike  cuts whose dearest stage costs no more than this share above the least are alike, since no clock knows
           better. Of these the one in which the fewest tensors cross is taken, and then the most even one.

    There must be as many links that train as there are stages.
    """
    least, _ = _search(row, stages, None)
    return _search(row, stages, int(least[0] * (1 + alike)))[1]


def _search(row: BalancedRow, stages: int, limit: int | None) -> tuple[tuple[int, int], list[int]]:
    """The best cut, and its score. Without a limit on what a stage may cost that is (the dearest stage, 0); with one it
    is (tensors that cross, the sum of squares). Both only grow from stage to stage, so the best cut of the first links
    is part of the best cut of all."""
    count = len(row.costs)
    costs, trained = [0, *accumulate(row.costs)], [0, *accumulate(map(int, row.trains))]
    best: dict[int, tuple[tuple[int, int], list[int]]] = {0: ((0, 0), [])}  # by the link that is next
    for _ in range(stages):
        longer: dict[int, tuple[tuple[int, int], list[int]]] = {}
        for first, ((a, b), begins) in best.items():
            for end in range(first + 1, count + 1):
                cost = costs[end] - costs[first]
                if limit is not None and cost > limit:
                    break
                if trained[end] == trained[first]:
                    continue
                new = (max(a, cost), 0) if limit is None else (a + row.widths[first], b + cost * cost)
                if end not in longer or new < longer[end][0]:
                    longer[end] = new, [*begins, first]
        best = longer
    return best[count]
