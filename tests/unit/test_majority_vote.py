"""The majority vote on results that should be equal: the value of the majority and the ranks that differ."""

from __future__ import annotations

import pytest

from unisono.train.diagnostics.majority_vote import vote


@pytest.mark.parametrize(
    ("opinions", "right", "wrong"),
    [
        ([(0, "a"), (1, "a"), (2, "b")], "a", (2,)),
        ([(0, "b"), (1, "a"), (2, "a"), (3, "a")], "a", (0,)),
        ([(0, "a"), (1, "b"), (0, "b"), (1, "b")], "b", (0,)),
        ([(0, "a"), (1, "b"), (0, "c"), (1, "b")], "b", (0,)),
        ([(1, "a"), (0, "a"), (0, "a"), (1, "b")], "a", (1,)),
        ([(0, "a"), (1, "b")], None, ()),
        ([(0, "a"), (1, "b"), (0, "a"), (1, "b")], None, ()),
        ([(0, "a"), (1, "b"), (2, "c")], None, ()),
        ([(0, "a"), (1, "a"), (2, "b"), (3, "b")], None, ()),
        ([(0, "a"), (0, "b"), (0, "a")], None, (0,)),
        ([(0, "a"), (1, "b"), (0, "b"), (1, "a")], None, (0, 1)),
        ([(0, "a"), (0, "b"), (1, "c"), (2, "d")], None, (0,)),
    ],
)
def test_ranks_that_differ_from_the_majority_are_named(
    opinions: list[tuple[int, str]], right: str | None, wrong: tuple[int, ...]
) -> None:
    assert vote(opinions) == (False, right, wrong)


def test_equal_results_agree() -> None:
    assert vote([(0, 7), (1, 7), (0, 7)]) == (True, 7, ())
    assert vote([(3, "alone")]) == (True, "alone", ())
