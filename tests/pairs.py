"""Combine two parameters of tests, and mark most pairs as slow."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest


def every_pair(firsts: Collection[Any], seconds: Collection[Any], most: int = 3) -> list[Any]:
    """Return all pairs for pytest.mark.parametrize, of which diagonals are quick and the others slow.

    With three or more values of each, one in three pairs is quick, and with two values, one in two. Each value is in a
    quick pair:

            a  b  c  d
        1   x        x
        2         x
        3      x
    """
    quick = min(most, len(firsts), len(seconds))
    return [
        pytest.param(first, second, marks=[pytest.mark.slow] * ((row + column) % quick > 0))
        for row, first in enumerate(firsts)
        for column, second in enumerate(seconds)
    ]
