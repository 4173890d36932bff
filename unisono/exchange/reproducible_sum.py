"""Wide sums: an all-reduce of float64 whose result does not depend on who adds what when. For any library's own order.

A virtual rank's gradient is the tree's leaf: its micro-batches, added in order in float32. What follows is arithmetic
with whole numbers. A leaf is rounded to a grid, a power of two for each tensor; leaves on one grid are whole numbers of
it, and whole numbers below 2^53 add up in float64 without a rounding, in any order and in any tree of any library:

                 2^51 grids                                        1 grid
    float64        |=================================================|     a sum of V leaves, all of them exact
    largest leaf   .        |<-- 8 bits --|                          |     room, should the next step's be larger
    its 24 bits    .        .             |========================|-|     rounded at most in its smallest elements

    process 0   leaves 0 .. 3   + + + +   [ a ] --+
                                                  all-reduce, float64   [ a + b ]  / weight, rounded once   p.grad
    process 1   leaves 4 .. 7   + + + +   [ b ] --+

The grid must be known when the first leaf is there, so it is made from the largest elements of the steps before (they
travel in one small message a step, and are in the checkpoint), with `ROOM` bits to spare (`following`). A leaf that is
larger all the same (an outlier; every leaf of the first step) is cut into windows above the grid, which are kept and
summed by themselves, just as exactly: that costs memory and traffic in such a step, and no bit. So the sum is proved to
be the same on any number of processes, and not merely in practice, as sums in float64 without a grid are: those depend
on their order where the leaves of one element spread over more than 29 bits (less log2 V), as an adversary's do.

What rounding to the grid costs: an element keeps all 24 bits of its float32 unless all of its tensor's leaves have been
2^(19 - log2 V) times larger (65,536 times with 8 virtual ranks); one that is 2^k times smaller than that loses k bits.

Rounding is the addition itself. The sum begins at 1.5 * 2^52 grids, where the neighbours of a float64 are one grid
apart, so what is added is rounded there. Ties would go to the even neighbour, which depends on what was added before:
each element is made 2^-52 larger, and there are none. (Demmel and Nguyen, Parallel Reproducible Summation, IEEE
Transactions on Computers 2015, whose windows lie at fixed places, so that they need two for each sum at all times.)

Memory, in gradient copies: two for the sum, one for the result, one for a leaf, whatever the number of virtual ranks.
Traffic is twice that of an all-reduce.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from unisono.distributed.process_group import ProcessGroup, Work, wait_for
from unisono.errors import LoopError
from unisono.exchange.base import Spans, Weights, all_reduce_bytes
from unisono.exchange.bucket_readiness import BucketedExchange, BucketReadiness
from unisono.exchange.buckets import (
    BucketLayout,
    FlatGradient,
    LooseGradient,
    blocks,
    finite,
)

ROOM = 8
"""Bits by which a tensor's largest element may grow from one step to the next before it needs a window of its own."""

NUDGE = 1 + 2.0**-52
"""So much larger is each element made, lest it lie in the middle between two grids. A float32 has 24 bits: it stays
what it is on any grid that is 2^3 times finer than its largest bit or coarser than its smallest."""

UNKNOWN = -149 - ROOM
"""The exponent of a tensor that has not been seen: below it is no float32, so each leaf is cut into windows."""

WINDOWS = 10
"""With the grid itself: float32 has exponents from -149 to 128, and a window is 34 bits or more apart from the next."""

KINDS = (torch.float32, torch.bfloat16, torch.float16)


class ReproducibleSum(BucketedExchange):
    """`world`: all processes that train, who agree on grids. Where parts of a model lie beside each other (tensor,
    context), that is more than the group that adds up."""

    promise = "exact"
    reason = "float64 adds the gradients of the virtual ranks on one grid, exactly, in whatever order"

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        virtual_ranks: int,
        group: ProcessGroup,
        *,
        world: ProcessGroup | None = None,
    ) -> None:
        self.params, self.group, self.world = params, group, world or group
        self.layout = BucketLayout(params, group.size)
        for bucket in self.layout.buckets:
            if bucket.dtype not in KINDS:
                raise _too_wide(bucket.dtype)
        self.bits = 51 - (virtual_ranks - 1).bit_length()  # of the largest leaf, in grids
        self.sums = [torch.zeros(b.size, dtype=torch.float64, device=b.device) for b in self.layout.buckets]
        self.places = {
            n: slice(offset, offset + self.layout.parts[n].numel())
            for b in self.layout.buckets
            for n, offset in zip(b.members, b.offsets, strict=True)
        }
        self.result = FlatGradient(self.layout)
        self.ready = BucketReadiness(self.layout, self._launch, self._add)
        self.exponents = [UNKNOWN] * len(params)
        # where a sum begins, as a row: in an addition a row's dtype counts, and a number's does not
        self._starts = [part.new_zeros(1, dtype=torch.float64) for part in self.layout.parts]
        self._known = [UNKNOWN - 1] * len(params)  # the exponents that these were made for
        self._leaf: LooseGradient | None = None
        self._to_come = 0  # micro-batches that are still to come for the leaf
        self._works: list[Work] = []

    def begin(self, spans: Spans, pieces: Mapping[int, int], weights: Weights) -> None:
        count = len(self.params)
        self.pieces = pieces
        self.ready.begin()
        self._leaf = None
        self._filled = [False] * count
        self._added = [False] * count  # of the leaf, which is complete
        self._windows: dict[tuple[int, int], torch.Tensor] = {}  # {(parameter, how high): sum}
        # of each parameter: 2 to which power all its leaves are below, and which windows somebody has
        self._seen = [[UNKNOWN] + [0] * (WINDOWS - 1) for _ in range(count)]
        for number, exponent in enumerate(self.exponents):
            if exponent != self._known[number]:
                self._starts[number].fill_(1.5 * 2**52 * self._grid(number))
                self._known[number] = exponent

    def enter(self, virtual_rank: int, *, last: bool) -> None:
        if self._leaf is None:
            self._leaf, self._to_come = LooseGradient(self.layout), self.pieces[virtual_rank]
            self._added = [False] * len(self.params)
        self._to_come -= 1
        self.ready.enter(self._leaf, notify=not self._to_come, last=last, launch=last and self.group.size > 1)

    def leave(self) -> None:
        self.ready.leave()
        if not self._to_come:
            for number, done in enumerate(self._added):
                if not done:
                    self._add(number)
            self._leaf = None

    def launch(self) -> None:
        self.ready.launch_rest()
        told = torch.tensor(self._seen, dtype=torch.int32, device=self.group.device)
        if self.world.size > 1:
            self._works.append(self.world.all_reduce(told, largest=True))
        self._told = told

    def finish(self, weight: float) -> bool:
        wait_for(self._works)
        self._works = []
        self._bytes = 0
        told = self._told.tolist()
        whole = [self._divide(bucket, told, weight) for bucket in range(len(self.sums))]
        self.result.assign_gradients(self.params)
        for number, (seen, *_) in enumerate(told):
            if seen > UNKNOWN:
                self.exponents[number] = next_exponent(self.exponents[number], seen)
        return all(whole)

    def commit(self) -> None:
        self._windows = {}

    @property
    def sent(self) -> float:
        return all_reduce_bytes(self._bytes, self.group)

    def state_dict(self) -> dict[str, Any]:
        return {"exponents": list(self.exponents)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.exponents = list(state["exponents"])

    def close(self) -> None:
        self.ready.close()
        self.zero()
        self._leaf = None
        self._windows = {}

    # -- a leaf

    def _grid(self, number: int, window: int = 0) -> float:
        """The grid of a parameter's sum, or of a window above it. Each is as far above the one below it as that can
        take: half a grid of the upper one at most is left for the lower one, V times."""
        return math.ldexp(1.0, self.exponents[number] + ROOM - self.bits + window * (self.bits - 1))

    def _add(self, number: int) -> None:
        """The gradient of a parameter is complete for this leaf: add it, while it is in the processor's cache."""
        assert self._leaf is not None
        self._added[number] = True
        grad = self._leaf.take(number)
        if grad is None:
            return
        self.params[number].grad = None
        if not grad.numel():
            return
        like = self.layout.parts[number]
        if grad.stride() != like.stride() or grad.dtype != like.dtype:
            grad = torch.empty_like(like).copy_(grad)
        bucket = self.layout.bucket_of[number]
        total, leaf = self.sums[bucket][self.places[number]], _row(grad)
        start, seen = self._starts[number], self._seen[number]
        top = _largest(leaf)
        exponent = math.frexp(top)[1] if math.isfinite(top) else UNKNOWN
        if exponent > self.exponents[number] + ROOM and top > 0:
            if not self._filled[number]:
                total.copy_(start.expand_as(total))
            self._add_in_windows(number, leaf, total, exponent)
        elif self._filled[number]:
            for block in blocks(leaf):  # so that what is made of it as float64 stays in the cache
                total[block].add_(leaf[block], alpha=NUDGE)
        else:
            for block in blocks(leaf):
                torch.add(start, leaf[block], alpha=NUDGE, out=total[block])
        self._filled[number] = True
        if top > 0:
            seen[0] = max(seen[0], exponent)

    def _add_in_windows(self, number: int, leaf: torch.Tensor, total: torch.Tensor, exponent: int) -> None:
        """A leaf that is too large for its grid: what is whole on coarser grids goes there, the coarsest first."""
        rest = leaf.double()
        above = exponent - self.exponents[number] - ROOM
        for window in reversed(range(1, 1 + -(-above // (self.bits - 1)))):
            start = 1.5 * 2**52 * self._grid(number, window)
            part = rest.add(start).sub_(start)
            rest.sub_(part)
            if not part.any():
                continue
            held = self._windows.get((number, window))
            self._windows[number, window] = part if held is None else held.add_(part)
            self._seen[number][window] = 1
        total.add_(rest, alpha=NUDGE)

    # -- the sum

    def _launch(self, bucket: int) -> None:
        """The sums of a bucket are complete here: whole numbers of their grids, without what they began at."""
        for number in self.layout.buckets[bucket].members:
            part = self.sums[bucket][self.places[number]]
            if self._filled[number]:
                part.sub_(self._starts[number])
            else:
                part.zero_()
        if self.group.size > 1:
            self._works.append(self.group.all_reduce(self.sums[bucket]))

    def _divide(self, bucket: int, told: list[list[int]], weight: float) -> bool:
        """What is above the grid comes to the sum, and the sum over the weight to p.grad; is all of it finite?"""
        total, result = self.sums[bucket], self.result.flats[bucket]
        self._bytes += total.nbytes
        for number in self.layout.buckets[bucket].members:
            part = total[self.places[number]]
            for window in range(1, WINDOWS):  # the sums are exact; here they are rounded, in one order everywhere
                if told[number][window] <= 0:
                    continue
                above = self._windows.get((number, window))
                above = torch.zeros_like(part) if above is None else above
                self._bytes += above.nbytes
                if self.group.size > 1:
                    self.group.sum_(above)
                part.add_(above)
        divisor = total.new_tensor(weight)
        # all: every block is to be divided
        found = [finite(torch.div(total[block], divisor, out=result[block])) for block in blocks(result)]
        return all(found)


def next_exponent(before: int, seen: int) -> int:
    """The exponent that the next step's grid is made for: gradients below 2**seen were added up on one for `before`.

    What is seen, with some inertia. It goes up by `ROOM` at most: larger leaves are added up in windows as exactly, and
    a single outlier must not leave a grid that swallows the gradients of the steps behind it. It goes down bit by bit,
    and never stays further above what is seen than `ROOM`.
    """
    if before <= UNKNOWN:
        return seen
    return min(max(seen, min(before - 1, seen + ROOM)), before + ROOM)


def _row(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor that fills its memory, in the order in which they lie there."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _largest(row: torch.Tensor) -> float:
    """The largest absolute value; not a number, if one of them is none."""
    least, most = map(float, torch.aminmax(row))
    return max(most, -least) if most == most else most


def _too_wide(dtype: torch.dtype) -> LoopError:
    return LoopError(
        f"exchange=wide was given parameters of {dtype}.".replace("torch.", ""),
        "float64 adds up numbers of 24 bits or fewer without rounding; these have more.",
        "--set exchange=tree",
    )
