"""The samples and the micro-batches of each step: a pure function of numbers. The only state is the step number.

A step takes one global batch from the epoch's permutation. The batch is divided among V virtual ranks as evenly as
possible, in order; each virtual rank divides its share into micro-batches, again as evenly as possible. The last batch
of an epoch is shorter and divided in the same way, so a virtual rank may get nothing. No sample is repeated, dropped or
padded.

    batch   | s17 s4 s9 s22 s1 s30 s8 | s2 ...           length 31, batch 7, V = 3, micro_batch 2
    shares  | s17 s4 | s9 s22 | s1 s30 s8 |
    micro   | s17 s4 | s9 s22 | s1 | s30 s8 |

Data in shards is not shuffled as a whole: see plan/ordering/window_shuffle.py. Batches may have samples of similar
length: see plan/ordering/length_buckets.py. A mixture of several sources, in which an "epoch" has as many samples as
its sources have together, has an order of its own: see plan/mixing/mixture_order.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from unisono.plan.mixing.mixture_order import Mixing, MixtureOrder
from unisono.plan.ordering.length_buckets import LengthBuckets
from unisono.plan.ordering.window_shuffle import WindowShuffle
from unisono.plan.rng_keys import ORDER, mix, shuffled


class MicroBatchId(NamedTuple):
    """The position of a micro-batch in the run.

    Attributes:
        step: from 0.
        virtual_rank: whose share it is in.
        number: within that share.
        spare: whether it is padding, which another process computes too and which counts only there (assignment.py).
    """

    step: int
    virtual_rank: int
    number: int
    spare: bool = False


def cut_batch(count: int, parts: int, part: int) -> tuple[int, int]:
    """Return the bounds [start, stop) of one of `parts` parts of `count` items, as equal as possible.

    Larger parts are spread evenly, not gathered at the front, so that a span of consecutive parts is even as well.
    """
    return part * count // parts, (part + 1) * count // parts


@dataclass(frozen=True, kw_only=True)
class BatchOrder:
    """The order of samples in a run.

    Attributes:
        length: samples in the data set (at least 1).
        batch: samples in a full global batch (at least 1).
        virtual_ranks: V, the number of shares of a batch.
        micro_batch: most samples in one micro-batch; None: a virtual rank's whole share.
        seed: of the run.
        shuffle: whether epochs are shuffled.
        shards: samples in each shard, for data in shards; sample numbers run through them in order.
        window: with shards, a sample is moved by fewer places than this; 1: only the shards are shuffled.
        lengths: of each sample, if batches are of similar length.
        mixing: for a mixture, its sources and their weights; sample numbers run through them in order.
    """

    length: int
    batch: int
    virtual_ranks: int
    micro_batch: int | None = None
    seed: int = 0
    shuffle: bool = True
    shards: tuple[int, ...] = ()
    window: int = 1
    lengths: tuple[int, ...] = ()
    mixing: Mixing | None = None

    @cached_property
    def steps_per_epoch(self) -> int:
        return -(-self.length // self.batch)

    def epoch(self, step: int) -> int:
        """Return the epoch (from 0) of a step."""
        return step // self.steps_per_epoch

    def batch_bounds(self, step: int) -> tuple[int, int]:
        """Return the bounds [start, stop) of a step's global batch in the epoch's permutation."""
        start = step % self.steps_per_epoch * self.batch
        stop = start + self.batch
        return start, stop if stop < self.length else self.length

    def batch_size(self, step: int) -> int:
        """Return the number of samples in a step's global batch: `batch`, or fewer at the end of an epoch."""
        start, stop = self.batch_bounds(step)
        return stop - start

    def micro_bounds(self, step: int, virtual_rank: int) -> list[tuple[int, int]]:
        """Return the bounds [start, stop) of a virtual rank's micro-batches in the epoch's permutation."""
        first, last = self.batch_bounds(step)
        cuts = _cuts(last - first, self.virtual_ranks, virtual_rank, self.micro_batch)
        return [(first + start, first + stop) for start, stop in cuts]

    def samples(self, steps: int) -> int:
        """Return the number of samples in the first `steps` steps."""
        epochs, rest = divmod(steps, self.steps_per_epoch)
        return epochs * self.length + min(rest * self.batch, self.length)

    def sizes(self, step: int) -> list[int]:
        """Return the number of samples in every micro-batch of a step, over all virtual ranks."""
        return [b - a for v in range(self.virtual_ranks) for a, b in self.micro_bounds(step, v)]

    def smallest(self, steps: int) -> int:
        """Return the size of the smallest micro-batch in the first `steps` steps."""
        end_of_epoch = self.sizes(self.steps_per_epoch - 1) if steps >= self.steps_per_epoch else []
        return min(self.sizes(0) + end_of_epoch)

    def permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return the order of all samples in an epoch, shape [length]."""
        return self.part(epoch, 0, self.length)

    def part(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return positions [start, stop) of the order of an epoch. The last two epochs or blocks are cached."""
        if self.mixing is not None:
            return self._mixed(epoch, start, stop)
        if not self.shuffle:
            return np.arange(start, stop, dtype=np.int64)
        if self.lengths:
            return self._buckets.permutation(epoch)[start:stop]
        if not self.shards:
            return _permutation(self.length, self.seed, epoch)[start:stop]
        return self._windows.part(epoch, start, stop)

    @cached_property
    def _windows(self) -> WindowShuffle:
        return WindowShuffle(self.shards, self.window, self.seed)

    @cached_property
    def _buckets(self) -> LengthBuckets:
        return LengthBuckets(self.lengths, self.batch, self.seed)

    def _mixed(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        first, last = start // self.batch, max(-(-stop // self.batch), start // self.batch + 1)
        steps = [self._mixture.step(epoch * self.steps_per_epoch + i) for i in range(first, last)]
        numbers = steps[0] if len(steps) == 1 else np.concatenate(steps)
        return numbers[start - first * self.batch : stop - first * self.batch]

    @cached_property
    def _mixture(self) -> MixtureOrder:
        assert self.mixing is not None
        return MixtureOrder(self.mixing, self.samples, self.seed, shuffle=self.shuffle)

    def micro_batches(self, step: int, virtual_rank: int) -> list[list[int]]:
        """Return the sample numbers of each micro-batch of a virtual rank in a step, in order."""
        return [samples for _, samples in self.places(step, (virtual_rank, virtual_rank + 1))]

    def places(self, step: int, span: tuple[int, int]) -> Iterator[tuple[MicroBatchId, list[int]]]:
        """Yield the micro-batches of the virtual ranks [lo, hi) in a step in order, each with its samples."""
        epoch, (first, last) = self.epoch(step), self.batch_bounds(step)
        for virtual_rank in range(*span):
            cuts = _cuts(last - first, self.virtual_ranks, virtual_rank, self.micro_batch)
            for number, (start, stop) in enumerate(cuts):
                yield MicroBatchId(step, virtual_rank, number), self.part(epoch, first + start, first + stop).tolist()


@lru_cache(maxsize=4096)
def _cuts(size: int, virtual_ranks: int, virtual_rank: int, micro_batch: int | None) -> list[tuple[int, int]]:
    """Return the bounds [start, stop) of a virtual rank's micro-batches in a batch of `size` samples."""
    start, stop = cut_batch(size, virtual_ranks, virtual_rank)
    share = stop - start
    if share == 0:
        return []
    pieces = 1 if micro_batch is None else -(-share // micro_batch)
    return [(start + a, start + b) for a, b in (cut_batch(share, pieces, i) for i in range(pieces))]


@lru_cache(maxsize=2)
def _permutation(length: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    return shuffled(length, mix(seed, ORDER, epoch))
