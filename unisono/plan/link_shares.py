"""How much of the gradient the processes of each host add up, from the rates of the links of the hosts.

The owner of a chunk receives it from every other host, and sends the total to each. A host that owns the share f of the
gradient, and sends k partial sums of what it does not own, has this on its link, in gradients:

    sends       k (1 - f) + (H - 1) f
    receives    (1 - f) + n f              n: the partial sums of the other hosts

With three hosts or more a larger share is more to send and to receive. So a host with a slow link owns less, down to
nothing: what remains is its own partial sum and the total. With two hosts the bytes do not depend on the shares.

Shares decide which process adds up an element, and never in which order: they do not change the bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from unisono.plan.reduction_tree import chain

UNLIKE = 0.75
"""Links are of unlike speed if the slowest has less than this part of the rate of the fastest."""

HALVINGS = 50
"""Of the interval in which the shortest time is: more do not change a share by a number."""


def are_unlike(links: Sequence[float]) -> bool:
    """Return whether links have such different rates that hosts should own different shares."""
    return bool(links) and min(links) < UNLIKE * max(links)


def host_shares(partial_sums: Sequence[int], links: Sequence[float]) -> list[float]:
    """Return the shares of the gradient that hosts own, so that the slowest link is done as early as possible.

    Args:
        partial_sums: How many partial sums each host sends.
        links: The rate of each host's link; any unit, all above 0.

    Returns:
        A share for each host. Their sum is 1.
    """
    count, total = len(links), sum(partial_sums)
    even = 1 / count
    loads = [
        ((sums, count - 1 - sums), (1, total - sums - 1))  # (load at share 0, growth with the share): sent, received
        for sums in partial_sums
    ]

    def bounds_within(seconds: float) -> list[tuple[float, float]]:
        return [_bounds(lines, seconds * link) for lines, link in zip(loads, links, strict=True)]

    short, long = (
        0.0,
        max((base + growth * even) / link for lines, link in zip(loads, links, strict=True) for base, growth in lines),
    )
    for _ in range(HALVINGS):
        middle = (short + long) / 2
        if _is_feasible(bounds_within(middle)):
            long = middle
        else:
            short = middle
    bounds = bounds_within(long)
    if not _is_feasible(bounds):  # by rounding
        return [even] * count
    least = chain([low for low, _ in bounds])
    room = chain([high for _, high in bounds]) - least
    part = (1 - least) / room if room > 0 else 0.0
    return [low + part * (high - low) for low, high in bounds]


def _bounds(lines: Sequence[tuple[int, int]], limit: float) -> tuple[float, float]:
    """Return the least and the largest share at which no load, base + growth * share, is above the limit."""
    low, high = 0.0, 1.0
    for base, growth in lines:
        if growth > 0:
            high = min(high, (limit - base) / growth)
        elif growth < 0:
            low = max(low, (limit - base) / growth)
        elif base > limit:
            return 1.0, 0.0
    return low, high


def _is_feasible(bounds: Sequence[tuple[float, float]]) -> bool:
    return all(0 <= low <= high for low, high in bounds) and (
        chain([low for low, _ in bounds]) <= 1 <= chain([high for _, high in bounds])
    )


def chunk_ends(length: int, shares: Sequence[float], unit: int) -> list[int]:
    """Return where the chunks of `length` elements end, in proportion to shares, at multiples of `unit`.

    The last chunk ends at `length`, a multiple of `unit`. A chunk may be empty.
    """
    ends: list[int] = []
    reached = 0.0
    units = length // unit
    for share in shares:
        reached += share
        ends.append(min(units, round(units * reached)) * unit)
    last = max((number for number, share in enumerate(shares) if share > 0), default=0)
    return [length if number >= last else end for number, end in enumerate(ends)]
