"""Placement: who computes which virtual ranks. A pure function of V and of how fast the processes are.

It is a free choice: it never changes what is computed. Process r gets a span [lo, hi) of neighbouring virtual ranks.
The spans are chosen so that the slowest process is done as early as possible, and among those choices so that as few
partial sums as possible have to travel (a span of one complete subtree sends one; see reduction_tree.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

from unisono.plan.batch_order import MicroBatchId
from unisono.plan.reduction_tree import subtrees

Spans = tuple[tuple[int, int], ...]
T = TypeVar("T")


def assign(virtual_ranks: int, seconds: Sequence[float]) -> Spans:
    """Spans for processes that need `seconds[r]` for one virtual rank each (any unit; all above 0).

    Processes beyond the number of virtual ranks get empty spans.
    """
    return _place(virtual_ranks, tuple(seconds))


def assign_evenly(virtual_ranks: int, size: int, sites: int = 1) -> Spans:
    """Spans for `size` processes that are equally fast.

    sites  number of sites (exchange=local_sgd); each has the same number of contiguous virtual ranks and of processes,
           and its processes share its virtual ranks only
    """
    share = virtual_ranks // sites
    one = _place(share, (1.0,) * (size // sites))
    return tuple((site * share + lo, site * share + hi) for site in range(sites) for lo, hi in one)


@lru_cache(maxsize=64)
def _place(virtual_ranks: int, seconds: tuple[float, ...]) -> Spans:
    most = _most(virtual_ranks, seconds)
    # fewest[b]: least cost at which the processes so far hold [0, b) together; came[r][b]: where r's span begins then
    fewest: dict[int, int] = {0: 0}
    came: list[dict[int, int]] = []
    left = sum(most)
    for limit in most:
        left -= limit
        reached: dict[int, int] = {}
        began: dict[int, int] = {}
        for a, cost in fewest.items():
            # what remains must fit the processes that remain, or the choice is a dead end
            for b in range(max(a, virtual_ranks - left), min(a + limit, virtual_ranks) + 1):
                candidate = cost + (len(subtrees(virtual_ranks, a, b)) or _IDLE)
                if b not in reached or candidate < reached[b]:
                    reached[b], began[b] = candidate, a
        fewest = reached
        came.append(began)
    spans: list[tuple[int, int]] = []
    stop = virtual_ranks
    for began in reversed(came):
        spans.append((began[stop], stop))
        stop = began[stop]
    return tuple(reversed(spans))


class Slot(NamedTuple):
    """Where a process sits: whose span it computes, and who shares that with it.

    span   which of the spans
    turn   of `turns` processes that compute its micro-batches in turn, this is number `turn`
    """

    span: int
    turn: int = 0
    turns: int = 1


def micro_batches_of(places: Iterable[tuple[MicroBatchId, T]], seat: Slot) -> Iterator[tuple[MicroBatchId, T]]:
    """What the process at `seat` computes of its span's micro-batches, each with its samples.

    Those who take turns compute equally many, since none can go on without the others (each holds a part of every
    layer). Where a last round runs out, the last micro-batch is computed once more, as a spare one:

        five micro-batches, two turns:      0 2 4  and  1 3 (4)
    """
    if seat.turns == 1:
        yield from places
        return
    known = list(places)
    for number in range(seat.turn, -(-len(known) // seat.turns) * seat.turns, seat.turns):
        place, samples = known[min(number, len(known) - 1)]
        yield place._replace(spare=number >= len(known)), samples


_IDLE = 2
"""What a process without a span counts as, in partial sums: it costs nothing to send, but people paid for it."""


def _most(virtual_ranks: int, seconds: tuple[float, ...]) -> list[int]:
    """How many virtual ranks each process may take so that the step ends as early as it can.

    The end of the step is n * seconds[r] for some process r and some n: the smallest such time by which all V are done.
    """
    slowest_end = virtual_ranks * min(seconds)
    ends = sorted({n * s for s in set(seconds) for n in range(1, virtual_ranks + 1) if n * s <= slowest_end})
    lo, hi = 0, len(ends) - 1
    while lo < hi:
        middle = (lo + hi) // 2
        if sum(_done_by(ends[middle], s, virtual_ranks) for s in seconds) >= virtual_ranks:
            hi = middle
        else:
            lo = middle + 1
    return [_done_by(ends[lo], s, virtual_ranks) for s in seconds]


def _done_by(end: float, seconds: float, most: int) -> int:
    """The largest n <= most with n * seconds <= end; the product is compared, since a quotient would round."""
    n = min(int(end / seconds) + 1, most)
    while n * seconds > end:
        n -= 1
    return n
