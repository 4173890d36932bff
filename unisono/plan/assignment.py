"""Assign virtual ranks to processes: a pure function of the number of virtual ranks and the speeds of the processes.

The assignment never changes what is computed. Process r gets a span [lo, hi) of consecutive virtual ranks. The spans
are chosen so that the slowest process ends as early as possible; among such choices, so that as few partial sums as
possible are sent (a span that is one complete subtree sends one; see reduction_tree.py). For more than NARROW_ABOVE
processes only choices near the proportional one are compared, so that the time grows with the number of processes and
not with its square.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

from unisono.plan.batch_order import MicroBatchId
from unisono.plan.reduction_tree import count_subtrees

Spans = tuple[tuple[int, int], ...]
T = TypeVar("T")


def assign(virtual_ranks: int, seconds: Sequence[float]) -> Spans:
    """Return the spans for processes of different speeds.

    Args:
        virtual_ranks: V, how many virtual ranks there are.
        seconds: for one virtual rank on each process; any unit, all above 0.

    Returns:
        A span for each process; empty ones if there are more processes than virtual ranks.
    """
    return _assign(virtual_ranks, tuple(seconds))


def assign_evenly(virtual_ranks: int, size: int, sites: int = 1) -> Spans:
    """Return the spans for `size` processes of equal speed.

    Args:
        virtual_ranks: V, how many virtual ranks there are.
        size: number of processes.
        sites: number of sites (exchange=local_sgd). Each has the same number of consecutive virtual ranks and of
            processes, and its processes share its virtual ranks only.
    """
    share = virtual_ranks // sites
    one_site = _assign(share, (1.0,) * (size // sites))
    return tuple((site * share + lo, site * share + hi) for site in range(sites) for lo, hi in one_site)


NARROW_ABOVE, BAND = 256, 4
"""Above this number of processes, a span starts at most BAND virtual ranks from the proportional place."""


@lru_cache(maxsize=64)
def _assign(virtual_ranks: int, seconds: tuple[float, ...]) -> Spans:
    limits = _limits(virtual_ranks, seconds)
    # costs[b]: least cost at which the processes so far hold [0, b); starts[r][b]: where the span of r starts then
    costs: dict[int, int] = {0: 0}
    starts: list[dict[int, int]] = []
    total = remaining = sum(limits)
    band = BAND if len(limits) > NARROW_ABOVE else virtual_ranks
    for limit in limits:
        remaining -= limit
        place = virtual_ranks * (total - remaining) // total
        # the remaining virtual ranks must fit the remaining processes
        least, most = max(virtual_ranks - remaining, place - band), min(virtual_ranks, place + band)
        next_costs: dict[int, int] = {}
        start_of: dict[int, int] = {}
        for a, cost in costs.items():
            for b in range(max(a, least), min(a + limit, most) + 1):
                candidate = cost + (count_subtrees(virtual_ranks, a, b) or _IDLE_COST)
                if b not in next_costs or candidate < next_costs[b]:
                    next_costs[b], start_of[b] = candidate, a
        costs = next_costs
        starts.append(start_of)
    spans: list[tuple[int, int]] = []
    stop = virtual_ranks
    for start_of in reversed(starts):
        spans.append((start_of[stop], stop))
        stop = start_of[stop]
    return tuple(reversed(spans))


class Slot(NamedTuple):
    """The share of a process: a span, whose micro-batches several processes may compute in turn.

    Attributes:
        span: the index of the span.
        turn: of this process among those that share the span.
        turns: the number of processes that share the span.
    """

    span: int
    turn: int = 0
    turns: int = 1


def micro_batches_of(span: Iterable[tuple[MicroBatchId, T]], slot: Slot) -> Iterator[tuple[MicroBatchId, T]]:
    """Return the micro-batches of a span that the process at `slot` computes.

    Processes that take turns compute equally many micro-batches, since each holds a part of every layer and needs the
    others. If the last round is incomplete, the last micro-batch is computed again as a spare one:

        five micro-batches, two turns:      0 2 4  and  1 3 (4)

    Args:
        span: the micro-batches of the span, each with its samples.
        slot: which of them to yield.
    """
    return iter(span) if slot.turns == 1 else _in_turn(list(span), slot)


def _in_turn(known: Sequence[tuple[MicroBatchId, T]], slot: Slot) -> Iterator[tuple[MicroBatchId, T]]:
    for number in range(slot.turn, -(-len(known) // slot.turns) * slot.turns, slot.turns):
        micro_batch, samples = known[min(number, len(known) - 1)]
        yield micro_batch._replace(spare=number >= len(known)), samples


_IDLE_COST = 2
"""The cost of a process without a span, in partial sums: it sends nothing, but it would be wasted."""


def _limits(virtual_ranks: int, seconds: tuple[float, ...]) -> list[int]:
    """Return how many virtual ranks each process may take so that the step ends as early as possible.

    The step ends after n * seconds[r] for some process r and some n: the smallest such time by which all V are done.
    """
    early = virtual_ranks / sum(1 / s for s in seconds) * (1 - 1e-6)  # just before the end of a perfect division
    counts = [_count_by(early, s, virtual_ranks) for s in seconds]
    done = sum(counts)
    following = [((n + 1) * s, n + 1, s) for n, s in zip(counts, seconds, strict=True) if n < virtual_ranks]
    heapq.heapify(following)
    end = early
    while done < virtual_ranks:
        end, n, s = following[0]
        done += 1
        heapq.heapreplace(following, ((n + 1) * s, n + 1, s))
    return [_count_by(end, s, virtual_ranks) for s in seconds]


def _count_by(end: float, seconds: float, most: int) -> int:
    """Return the largest n <= most with n * seconds <= end. The product is compared, since a quotient would round."""
    n = min(int(end / seconds) + 1, most)
    while n * seconds > end:
        n -= 1
    return n
