"""Fragments of local SGD's outer step: contiguous, nonempty, and of about one size."""

from __future__ import annotations

import pytest

from unisono.local_sgd.outer import fragments_of


@pytest.mark.parametrize("sizes", [[1], [5, 1, 1, 1], [1, 1, 1, 100], [3] * 10, [0, 0, 7]])
def test_fragments_are_contiguous_and_none_is_empty(sizes: list[int]) -> None:
    for count in range(1, len(sizes) + 1):
        fragments = fragments_of(sizes, count)
        assert len(fragments) == count
        assert all(fragments)
        assert [number for fragment in fragments for number in fragment] == list(range(len(sizes)))


def test_fragments_have_about_as_many_elements_each() -> None:
    assert fragments_of([4, 4, 4, 4, 16, 16], 3) == [[0, 1, 2, 3], [4], [5]]
