"""The order of data in shards, read from front to back: the shards are shuffled, then samples within a window.

No sample moves by `window` places or more, so who reads a part of an epoch has to look at a window more, and at nothing
else. That also holds for the order itself: a block of it is made from its own places and a window on each side.

    shards  | a0 a1 a2 a3 | b0 b1 | c0 c1 c2 |               window 3
    turned  | c0 c1 c2 | b0 b1 | a0 a1 a2 a3 |
    epoch   | c0 c2 c1   b0 b1   a1 a0 a2 a3 |               each place plus a number below 3, sorted
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from unisono.plan.rng_keys import ORDER, SHARDS, hashed, mix, shuffled

Numbers = npt.NDArray[np.int64]
KEPT_BLOCKS = 4


class WindowShuffle:
    """The order of every epoch.

    shards  samples in each shard; sample numbers run through them in order
    window  a sample is moved by fewer places than this (at least 1)
    """

    def __init__(self, shards: tuple[int, ...], window: int, seed: int) -> None:
        self.counts = np.array(shards, dtype=np.int64)
        self.length, self.window, self.seed = int(self.counts.sum()), window, seed
        self.block = max(8 * window, 4096)
        """Places that are made at once: so many that their borders, a window on each side, cost little."""
        self._blocks: OrderedDict[tuple[int, int], Numbers] = OrderedDict()
        self._turned: tuple[int, Numbers, Numbers] | None = None

    def part(self, epoch: int, start: int, stop: int) -> Numbers:
        """The sample numbers in places [start, stop) of an epoch."""
        first = start // self.block
        blocks = [self._block(epoch, i) for i in range(first, max(-(-stop // self.block), first + 1))]
        walk = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
        return walk[start - first * self.block : stop - first * self.block]

    def _block(self, epoch: int, number: int) -> Numbers:
        if (epoch, number) not in self._blocks:
            self._blocks[epoch, number] = self._build(epoch, number * self.block)
            if len(self._blocks) > KEPT_BLOCKS:
                self._blocks.popitem(last=False)
        return self._blocks[epoch, number]

    def _build(self, epoch: int, start: int) -> Numbers:
        """What ends up in [start, stop) comes from [start - window, stop + window); what lies before goes before it."""
        ends, firsts = self._turns(epoch)
        stop = min(start + self.block, self.length)
        low, high = max(start - self.window, 0), min(stop + self.window, self.length)
        places = np.arange(low, high, dtype=np.int64)
        shard = np.searchsorted(ends, places, side="right")
        numbers = firsts[shard] + places - np.where(shard > 0, ends[shard - 1], 0)
        key = mix(self.seed, ORDER, epoch)
        moved = places + (hashed(low, high, key) % np.uint64(self.window)).astype(np.int64)
        made: Numbers = numbers[np.argsort(moved, kind="stable")][start - low : stop - low]
        return made

    def _turns(self, epoch: int) -> tuple[Numbers, Numbers]:
        """Of the shards in their order of an epoch: where each ends there, and its first sample's number."""
        if self._turned is None or self._turned[0] != epoch:
            turn = shuffled(len(self.counts), mix(self.seed, SHARDS, epoch))
            firsts = np.cumsum(self.counts) - self.counts
            self._turned = epoch, np.cumsum(self.counts[turn]), firsts[turn]
        return self._turned[1:]
