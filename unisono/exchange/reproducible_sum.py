"""Add gradients in float64 so that the result does not depend on the order, for any library's all-reduce.

The gradient of a virtual rank is a leaf: its micro-batches, added in order in float32. The rest is integer arithmetic.
Each leaf is rounded to a grid, a power of two for each tensor. Leaves on one grid are integer multiples of it, and
integers below 2^53 add up in float64 without rounding, in any order and in any library's tree:

                 2^51 grids                                        1 grid
    float64        |=================================================|     a sum of V leaves, all of them exact
    largest leaf   .        |<-- 8 bits --|                          |     room for a larger leaf in the next step
    its 24 bits    .        .             |========================|-|     only its smallest elements are rounded

    process 0   leaves 0 .. 3   + + + +   [ a ] --+
                                                  all-reduce, float64   [ a + b ]  / weight, rounded once   p.grad
    process 1   leaves 4 .. 7   + + + +   [ b ] --+

The grid must be known when the first leaf arrives. So it is computed from the largest elements of the steps before,
with `ROOM` bits to spare (`next_exponent`). These travel in one small message a step, and are in the checkpoint. A leaf
that is larger (an outlier, and every leaf of the first step) is cut into windows above the grid. Windows are kept and
summed by themselves, just as exactly: that costs memory and traffic in such a step, and no bit. So the sum is proved to
be the same on any number of processes. Sums in float64 without a grid are the same only in practice: they depend on the
order where the leaves of one element spread over more than 29 bits (less log2 V), as an adversary's do.

Rounding to the grid costs this: an element keeps all 24 bits of its float32 unless all leaves of its tensor have been
2^(19 - log2 V) times larger (65,536 times with 8 virtual ranks). One that is 2^k times smaller than that loses k bits.

The addition itself rounds. The sum begins at 1.5 * 2^52 grids, where neighboring float64 values are one grid apart, so
each term is rounded to the grid. Ties would go to the even neighbor, which depends on what was added before; so each
element is made 2^-52 larger, and there are no ties. (Demmel and Nguyen, Parallel Reproducible Summation, IEEE
Transactions on Computers 2015, have windows at fixed places, and therefore need two for each sum at all times.)

Memory, in gradient copies: two for the sum, one for the result, one for a leaf, for any number of virtual ranks.
Traffic is twice that of an all-reduce. Several processes of a host add up in shared memory first (float64_sums.py).
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
from unisono.exchange.buckets import BucketLayout, blocks, finite
from unisono.exchange.float64_sums import build_sums
from unisono.exchange.gradient_accumulation import FlatGradient, LooseGradient

ROOM = 8
"""Bits by which a tensor's largest element may grow from one step to the next before it needs a window of its own."""

NUDGE = 1 + 2.0**-52
"""The factor that keeps elements from the middle between two grid points. A float32 has 24 bits, so it does not change
on any grid that is 2^3 times finer than its largest bit or coarser than its smallest."""

UNKNOWN = -149 - ROOM
"""The exponent of a tensor that has not been seen. It is below every float32, so each leaf is cut into windows."""

WINDOWS = 10
"""The largest number of windows, the grid included: float32 has exponents from -149 to 128, and windows are 34 bits or
more apart."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class ReproducibleSum(BucketedExchange):
    """Average gradients by sums in float64 that are exact in any order.

    Args:
        params: The parameters.
        virtual_ranks: The number of leaves.
        group: The processes that add up their gradients.
        world: All processes that train, which agree on grids. Under tensor and context parallelism these are more than
            `group`.
    """

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
            if bucket.dtype not in DTYPES:
                raise _dtype_error(bucket.dtype)
        self.bits = 51 - (virtual_ranks - 1).bit_length()  # of the largest leaf, in grids
        self.sums = build_sums(self.layout.buckets, group)
        self.places = {
            n: slice(offset, offset + self.layout.parts[n].numel())
            for b in self.layout.buckets
            for n, offset in zip(b.members, b.offsets, strict=True)
        }
        self.result = FlatGradient(self.layout)
        self.ready = BucketReadiness(self.layout, self._launch, self._add)
        self.exponents = [UNKNOWN] * len(params)
        # the first value of each sum, as a tensor: in an addition a tensor's dtype counts, and a number's does not
        self._starts = [part.new_zeros(1, dtype=torch.float64) for part in self.layout.parts]
        self._starts_exponents = [UNKNOWN - 1] * len(params)  # the exponents for which `_starts` were computed
        self._leaf: LooseGradient | None = None
        self._remaining = 0  # micro-batches of the leaf that are still to come
        self._works: list[Work] = []

    def begin(self, spans: Spans, pieces: Mapping[int, int], weights: Weights) -> None:
        count = len(self.params)
        self.pieces = pieces
        self.ready.begin()
        self._leaf = None
        self._filled = [False] * count
        self._added = [False] * count  # parameters of the current leaf whose gradient has been added
        self._windows: dict[tuple[int, int], torch.Tensor] = {}  # {(parameter, window): sum}
        # for each parameter: an exponent above all its leaves, and a flag for each window that is in use
        self._seen = [[UNKNOWN] + [0] * (WINDOWS - 1) for _ in range(count)]
        for number, exponent in enumerate(self.exponents):
            if exponent != self._starts_exponents[number]:
                self._starts[number].fill_(1.5 * 2**52 * self._grid(number))
                self._starts_exponents[number] = exponent

    def enter(self, virtual_rank: int, *, last: bool) -> None:
        if self._leaf is None:
            self._leaf, self._remaining = LooseGradient(self.layout), self.pieces[virtual_rank]
            self._added = [False] * len(self.params)
        self._remaining -= 1
        self.ready.enter(self._leaf, notify=not self._remaining, last=last, launch=last and self.group.size > 1)

    def leave(self) -> None:
        self.ready.leave()
        if not self._remaining:
            self._add([number for number, done in enumerate(self._added) if not done])
            self._leaf = None

    def launch(self) -> None:
        self.ready.launch_rest()
        self._seen_by_all = torch.tensor(self._seen, dtype=torch.int32, device=self.group.device)
        if self.world.size > 1:
            self._works.append(self.world.all_reduce(self._seen_by_all, largest=True))

    def finish(self, weight: float) -> bool:
        wait_for(self._works)
        self._works = []
        self._bytes = 0
        seen = self._seen_by_all.tolist()
        found = [self._divide(bucket, seen, weight) for bucket in range(len(self.sums.flats))]
        self.result.assign_gradients(self.params)
        for number, (exponent, *_) in enumerate(seen):
            if exponent > UNKNOWN:
                self.exponents[number] = next_exponent(self.exponents[number], exponent)
        return all(found)

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
        self.sums.close()
        self.zero()
        self._leaf = None
        self._windows = {}

    # -- add a leaf

    def _grid(self, number: int, window: int = 0) -> float:
        """Return the grid of a parameter's sum, or of a window above it.

        Each is as far above the one below as that one has room for: at most half a grid of the upper one is left for
        the lower one, V times.
        """
        return math.ldexp(1.0, self.exponents[number] + ROOM - self.bits + window * (self.bits - 1))

    def _add(self, numbers: Sequence[int]) -> None:
        """Add gradients that are complete for this leaf: one in the processor's cache, or an accelerator's bucket."""
        assert self._leaf is not None
        leaves: dict[int, torch.Tensor] = {}
        for number in numbers:
            self._added[number] = True
            grad = self._leaf.take(number)
            if grad is None:
                continue
            self.params[number].grad = None
            like = self.layout.parts[number]
            if grad.stride() != like.stride() or grad.dtype != like.dtype:
                grad = torch.empty_like(like).copy_(grad)
            if grad.numel():
                leaves[number] = _in_memory_order(grad)
        for (number, leaf), largest in zip(leaves.items(), _largest(list(leaves.values())), strict=True):
            total = self.sums.flats[self.layout.bucket_of[number]][self.places[number]]
            exponent = math.frexp(largest)[1] if math.isfinite(largest) else UNKNOWN
            if exponent > self.exponents[number] + ROOM and largest > 0:
                if not self._filled[number]:
                    total.copy_(self._starts[number].expand_as(total))
                self._add_in_windows(number, leaf, total, exponent)
            elif self._filled[number]:
                for block in blocks(leaf):  # so that its float64 copy stays in the cache
                    total[block].add_(leaf[block], alpha=NUDGE)
            else:
                for block in blocks(leaf):
                    torch.add(self._starts[number], leaf[block], alpha=NUDGE, out=total[block])
            self._filled[number] = True
            if largest > 0:
                self._seen[number][0] = max(self._seen[number][0], exponent)

    def _add_in_windows(self, number: int, leaf: torch.Tensor, total: torch.Tensor, exponent: int) -> None:
        """Add a leaf that is too large for its grid: its multiples of coarser grids go there, the coarsest first."""
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

    # -- reduce

    def _launch(self, bucket: int) -> None:
        """Start to sum a bucket, which is complete on this process. Its first values are subtracted before."""
        for number in self.layout.buckets[bucket].members:
            part = self.sums.flats[bucket][self.places[number]]
            if self._filled[number]:
                part.sub_(self._starts[number])
            else:
                part.zero_()
        if self.group.size > 1:
            self._works.append(self.sums.all_reduce(bucket))

    def _divide(self, bucket: int, seen: list[list[int]], weight: float) -> bool:
        """Add the windows to a bucket's sum and divide it by the weight. Return whether the result is finite."""
        total, result = self.sums.flats[bucket], self.result.flats[bucket]
        self._bytes += total.nbytes
        for number in self.layout.buckets[bucket].members:
            part = total[self.places[number]]
            for window in range(1, WINDOWS):  # the sums are exact; here they are rounded, in a fixed order
                if seen[number][window] <= 0:
                    continue
                above = self._windows.get((number, window))
                above = torch.zeros_like(part) if above is None else above
                self._bytes += above.nbytes
                if self.group.size > 1:
                    self.group.sum_(above)
                part.add_(above)
        divisor = total.new_tensor(weight)
        # a list: every block is divided
        found = [finite(torch.div(total[block], divisor, out=result[block])) for block in blocks(result)]
        return all(found)


def next_exponent(before: int, seen: int) -> int:
    """Return the exponent for the next step's grid.

    It follows the gradients with some inertia. It rises by `ROOM` at most: larger leaves are added in windows as
    exactly, and a single outlier must not leave a grid that swallows the gradients of the next steps. It falls by one
    bit a step, and is never further than `ROOM` above the gradients.

    Args:
        before: The exponent of this step's grid.
        seen: This step's gradients are below 2**seen.
    """
    if before <= UNKNOWN:
        return seen
    return min(max(seen, min(before - 1, seen + ROOM)), before + ROOM)


def _in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a dense tensor as a row, in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _largest(rows: Sequence[torch.Tensor]) -> list[float]:
    """Return the largest absolute value of each row; NaN if an element is NaN. Waits for an accelerator once."""
    if len({row.device for row in rows}) > 1:
        return [largest for row in rows for largest in _largest([row])]
    bounds = [torch.stack(torch.aminmax(row)) for row in rows]
    pairs = torch.stack(bounds).tolist() if bounds else []
    return [max(high, -low) if high == high else high for low, high in pairs]


def _dtype_error(dtype: torch.dtype) -> LoopError:
    name = str(dtype).removeprefix("torch.")
    return LoopError(
        f"exchange=wide does not support {name} parameters.",
        "float64 adds numbers of 24 bits or fewer without rounding; these have more.",
        "--set exchange=tree",
    )
