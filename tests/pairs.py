"""Every one of these with every one of those is many tests, most of which prove little that others do not."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest


def every_pair(ones: Collection[Any], others: Collection[Any], most: int = 3) -> list[Any]:
    """All pairs, for pytest.mark.parametrize. Among the quick tests is one in three of them (in two, if there are but
    two of either), along diagonals, so that none of either is left out; the rest is slow:

            a  b  c  d
        1   x        x
        2         x
        3      x
    """
    quick = min(most, len(ones), len(others))
    return [
        pytest.param(one, other, marks=[pytest.mark.slow] * ((row + column) % quick > 0))
        for row, one in enumerate(ones)
        for column, other in enumerate(others)
    ]
