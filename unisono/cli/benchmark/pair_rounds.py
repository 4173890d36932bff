"""The order in which pairs are measured."""

from __future__ import annotations

from collections.abc import Iterator

ONE_BY_ONE = 16
"""With more processes than this, disjoint pairs are measured at the same time."""


def rounds(size: int) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds of disjoint pairs: one pair each, or for many processes as in a tournament."""
    if size <= ONE_BY_ONE:
        yield from ([(one, other)] for one in range(size) for other in range(one + 1, size))
    else:
        yield from tournament(size)


def tournament(size: int) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds of disjoint pairs, so that each pair is in one of them, as in a round-robin tournament.

    https://en.wikipedia.org/wiki/Round-robin_tournament#Circle_method
    """
    places = [*range(size), *([None] if size % 2 else [])]
    for _ in range(len(places) - 1):
        met = zip(places[: len(places) // 2], reversed(places), strict=False)
        yield [(min(a, b), max(a, b)) for a, b in met if a is not None and b is not None]
        places = [places[0], places[-1], *places[1:-1]]
