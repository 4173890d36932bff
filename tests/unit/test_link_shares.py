"""Shares of the gradient by the rates of links: the slowest link is done as early as it can be."""

from __future__ import annotations

import itertools
import random

import pytest

from unisono.plan.assignment import assign_evenly
from unisono.plan.host_routes import HostRoutes
from unisono.plan.link_shares import are_unlike, chunk_ends, host_shares
from unisono.plan.reduction_tree import Plan


def seconds_of(shares: list[float], partial_sums: list[int], links: list[float]) -> float:
    """Return when the slowest link is done, by the formulas of plan/link_shares.py."""
    count, total = len(links), sum(partial_sums)
    return max(
        max(sums * (1 - share) + (count - 1) * share, (1 - share) + (total - sums) * share) / link
        for share, sums, link in zip(shares, partial_sums, links, strict=True)
    )


def test_equal_links_have_equal_shares() -> None:
    assert host_shares([1] * 4, [5.0] * 4) == pytest.approx([0.25] * 4)
    assert not are_unlike([5.0, 4.0, 4.5])
    assert not are_unlike([])


def test_a_host_with_a_slow_link_owns_nothing() -> None:
    assert host_shares([1] * 4, [1.0, 1.0, 1.0, 0.1]) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0], abs=1e-9)
    assert are_unlike([1.0, 1.0, 1.0, 0.1])


def test_no_other_shares_are_done_earlier() -> None:
    draw = random.Random(1)
    grid = [i / 20 for i in range(21)]
    for _ in range(30):
        partial_sums = [draw.choice([1, 1, 2, 3]) for _ in range(3)]
        links = [draw.choice([0.1, 0.3, 1.0, 2.5]) for _ in range(3)]
        shares = host_shares(partial_sums, links)
        assert sum(shares) == pytest.approx(1)
        assert all(0 <= share <= 1 for share in shares)
        others = [[a, b, 1 - a - b] for a, b in itertools.product(grid, grid) if a + b <= 1]
        best = min(seconds_of(other, partial_sums, links) for other in others)
        assert seconds_of(shares, partial_sums, links) <= best * (1 + 1e-9)


@pytest.mark.parametrize("shares", [[0.25] * 4, [1 / 3, 1 / 3, 1 / 3, 0], [0, 0.1, 0.9], [1.0, 0, 0], [1 / 7] * 7])
def test_chunks_cover_a_bucket(shares: list[float]) -> None:
    for units in (len(shares), 3 * len(shares), 1000 * len(shares)):
        ends = chunk_ends(16 * units, shares, 16)
        lengths = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        assert sum(lengths) == 16 * units
        assert all(length >= 0 and length % 16 == 0 for length in lengths)
        assert all(abs(length - 16 * units * share) <= 16 for length, share in zip(lengths, shares, strict=True))
        assert all(length == 0 for length, share in zip(lengths, shares, strict=True) if not share)


@pytest.mark.parametrize(("count", "processes"), [(4, 1), (4, 2), (8, 3)])
def test_the_bytes_of_a_slow_link_are_the_least(count: int, processes: int) -> None:
    """A host sends its partial sum and receives the total. Less is not possible."""
    size = count * processes
    plan = Plan(96, tuple(assign_evenly(96, size)))
    hosts = [rank - rank % processes for rank in range(size)]
    links = [0.1 if host == hosts[-1] else 1.0 for host in hosts]
    every = [HostRoutes(plan, hosts, rank, links) for rank in range(size)]
    assert sum(every[0].shares) == pytest.approx(1)
    sent = {host: sum(each.crossing() for each in every if each.host == host) for host in set(hosts)}
    least = len(every[-1].on_host(hosts[-1])[1])
    assert sent[hosts[-1]] == pytest.approx(least)
    assert all(each.links == tuple(links) and each.shares == every[0].shares for each in every)
    alike = HostRoutes(plan, hosts, 0)
    assert alike.shares == [1 / size] * size
    assert [chunk.stop for chunk in alike.chunks(32 * size, 16)] == [32 * (rank + 1) for rank in range(size)]
