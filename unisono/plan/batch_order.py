"""Order: which samples a step sees, and in which micro-batches. A pure function of numbers; no state but the step.

A step takes one global batch from the epoch's permutation. The batch is dealt to V virtual ranks as evenly as it goes,
in order; each virtual rank cuts its share into micro-batches, again as evenly as it goes. The last batch of an epoch is
what is left: shorter, dealt the same way, so a virtual rank may get nothing. No sample is repeated, dropped or padded.

    batch   | s17 s4 s9 s22 s1 s30 s8 | s2 ...           length 31, batch 7, V = 3, micro_batch 2
    shares  | s17 s4 | s9 s22 | s1 s30 s8 |
    micro   | s17 s4 | s9 s22 | s1 | s30 s8 |

Data that lies in shards is not shuffled as a whole: see plan/window_shuffle.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from unisono.plan.rng_keys import ORDER, mix, shuffled
from unisono.plan.window_shuffle import WindowShuffle


class MicroBatchId(NamedTuple):
    """Where a micro-batch stands in the run: its step (from 0), its virtual rank, its number within that share.

    spare  it is computed by somebody else, and here only to keep company (plan/assignment.py): it counts for nothing
    """

    step: int
    virtual_rank: int
    number: int
    spare: bool = False


def cut_batch(count: int, hands: int, hand: int) -> tuple[int, int]:
    """The part [start, stop) of `count` things that goes to `hand` when `hands` share them as evenly as it goes.

    Larger parts are spread over the hands, not bunched at the front, so that a span of neighbours is even as well.
    """
    return hand * count // hands, (hand + 1) * count // hands


@dataclass(frozen=True, kw_only=True)
class BatchOrder:
    """The order of a run.

    length         samples in the data set (at least 1)
    batch          samples in a full global batch (at least 1)
    virtual_ranks  V, how many shares a batch is dealt into
    micro_batch    most samples in one micro-batch; None: a virtual rank's whole share
    seed           of the run
    shuffle        False: epochs walk the data in its own order
    shards         samples in each shard, if the data lies in shards: sample numbers run through them in order
    window         then a sample is moved by fewer places than this; 1: only the shards are shuffled
    """

    length: int
    batch: int
    virtual_ranks: int
    micro_batch: int | None = None
    seed: int = 0
    shuffle: bool = True
    shards: tuple[int, ...] = ()
    window: int = 1

    @cached_property
    def steps_per_epoch(self) -> int:
        return -(-self.length // self.batch)

    def epoch(self, step: int) -> int:
        """The epoch (from 0) that `step` belongs to."""
        return step // self.steps_per_epoch

    def batch_bounds(self, step: int) -> tuple[int, int]:
        """The part [start, stop) of the epoch's permutation that is `step`'s global batch."""
        start = step % self.steps_per_epoch * self.batch
        return start, min(start + self.batch, self.length)

    def batch_size(self, step: int) -> int:
        """Samples in `step`'s global batch: `batch`, or fewer at the end of an epoch."""
        start, stop = self.batch_bounds(step)
        return stop - start

    def micro_bounds(self, step: int, virtual_rank: int) -> list[tuple[int, int]]:
        """The micro-batches of a virtual rank in `step`, as parts [start, stop) of the epoch's permutation."""
        first, last = self.batch_bounds(step)
        cuts = _cuts(last - first, self.virtual_ranks, virtual_rank, self.micro_batch)
        return [(first + start, first + stop) for start, stop in cuts]

    def samples(self, steps: int) -> int:
        """Samples in the first `steps` steps."""
        epochs, rest = divmod(steps, self.steps_per_epoch)
        return epochs * self.length + min(rest * self.batch, self.length)

    def sizes(self, step: int) -> list[int]:
        """Samples in every micro-batch of `step`, over all virtual ranks."""
        return [b - a for v in range(self.virtual_ranks) for a, b in self.micro_bounds(step, v)]

    def smallest(self, steps: int) -> int:
        """Samples in the smallest micro-batch of so many steps: of the first, or of an epoch's last, if that comes."""
        tail = self.sizes(self.steps_per_epoch - 1) if steps >= self.steps_per_epoch else []
        return min(self.sizes(0) + tail)

    def permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        """The order of all samples in `epoch`, shape [length]."""
        return self.part(epoch, 0, self.length)

    def part(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Places [start, stop) of that order. What it is cut from is kept for the last two epochs or blocks."""
        if not self.shuffle:
            return np.arange(start, stop, dtype=np.int64)
        if not self.shards:
            return _permutation(self.length, self.seed, epoch)[start:stop]
        return self._windows.part(epoch, start, stop)

    @cached_property
    def _windows(self) -> WindowShuffle:
        return WindowShuffle(self.shards, self.window, self.seed)

    def micro_batches(self, step: int, virtual_rank: int) -> list[list[int]]:
        """The sample numbers of each micro-batch of a virtual rank in `step`, in order."""
        return [samples for _, samples in self.places(step, (virtual_rank, virtual_rank + 1))]

    def places(self, step: int, span: tuple[int, int]) -> Iterator[tuple[MicroBatchId, list[int]]]:
        """Every micro-batch of the virtual ranks [lo, hi) in `step`, with its place, in the order to compute them."""
        epoch, (first, last) = self.epoch(step), self.batch_bounds(step)
        for virtual_rank in range(*span):
            cuts = _cuts(last - first, self.virtual_ranks, virtual_rank, self.micro_batch)
            for number, (start, stop) in enumerate(cuts):
                yield MicroBatchId(step, virtual_rank, number), self.part(epoch, first + start, first + stop).tolist()


@lru_cache(maxsize=4096)
def _cuts(size: int, virtual_ranks: int, virtual_rank: int, micro_batch: int | None) -> list[tuple[int, int]]:
    """The micro-batches of a virtual rank in a batch of `size` samples, as parts [start, stop) of the batch."""
    start, stop = cut_batch(size, virtual_ranks, virtual_rank)
    share = stop - start
    if share == 0:
        return []
    pieces = 1 if micro_batch is None else -(-share // micro_batch)
    return [(start + a, start + b) for a, b in (cut_batch(share, pieces, i) for i in range(pieces))]


@lru_cache(maxsize=2)
def _permutation(length: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    return shuffled(length, mix(seed, ORDER, epoch))
