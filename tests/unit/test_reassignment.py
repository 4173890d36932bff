"""After a death every virtual rank has one owner, and missing ones are divided evenly."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unisono.plan.reassignment import assign_missing

KINDS = st.lists(st.tuples(st.integers(-1, 4), st.integers(0, 3)), min_size=1, max_size=40)
"""For each virtual rank: the process that holds it (-1: none), and its number of micro-batches."""


@given(KINDS, st.integers(1, 5))
def test_each_virtual_rank_has_one_owner_and_lost_ones_are_divided_evenly(
    kinds: list[tuple[int, int]], size: int
) -> None:
    held = [[v for v, (of, _) in enumerate(kinds) if of == rank] for rank in range(size)]
    pieces = {v: count for v, (_, count) in enumerate(kinds)}
    dealt = assign_missing(pieces, held)
    assert sorted(v for of in [*held, *dealt] for v in of) == list(range(len(kinds)))
    work = [sum(pieces[v] > 0 for v in of) for of in dealt]
    assert max(work) - min(work) <= 1


def test_consecutive_virtual_ranks_stay_together() -> None:
    pieces = dict.fromkeys(range(8), 1) | {7: 0}
    assert assign_missing(pieces, [[0, 1], [2]]) == [[3, 4, 7], [5, 6]]
