"""The order of samples in shards that are read from front to back: the shards are shuffled, then samples in a window.

No sample moves by `window` positions or more. So a process that reads a part of an epoch needs at most a window more on
each side, and a block of the order is computed from its own positions and a window on each side.

    shards    | a0 a1 a2 a3 | b0 b1 | c0 c1 c2 |             window 3
    shuffled  | c0 c1 c2 | b0 b1 | a0 a1 a2 a3 |
    epoch     | c0 c2 c1   b0 b1   a1 a0 a2 a3 |             each position plus a number below 3, sorted
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from unisono.plan.rng_keys import ORDER, SHARDS, hashed, mix, shuffled

Numbers = npt.NDArray[np.int64]
KEPT_BLOCKS = 4
"""Blocks that are cached."""


class WindowShuffle:
    """The order of every epoch.

    Args:
        shards: samples in each shard; sample numbers run through them in order.
        window: a sample is moved by fewer positions than this (at least 1).
        seed: of the run.
    """

    def __init__(self, shards: tuple[int, ...], window: int, seed: int) -> None:
        self.counts = np.array(shards, dtype=np.int64)
        self.length, self.window, self.seed = int(self.counts.sum()), window, seed
        self.block = max(8 * window, 4096)
        """Positions in a block: so many that the borders, a window on each side, cost little."""
        self._blocks: OrderedDict[tuple[int, int], Numbers] = OrderedDict()
        self._shuffled: tuple[int, Numbers, Numbers] | None = None

    def part(self, epoch: int, start: int, stop: int) -> Numbers:
        """Return the sample numbers at positions [start, stop) of an epoch."""
        first = start // self.block
        blocks = [self._block(epoch, i) for i in range(first, max(-(-stop // self.block), first + 1))]
        numbers = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
        return numbers[start - first * self.block : stop - first * self.block]

    def _block(self, epoch: int, number: int) -> Numbers:
        if (epoch, number) not in self._blocks:
            self._blocks[epoch, number] = self._build(epoch, number * self.block)
            if len(self._blocks) > KEPT_BLOCKS:
                self._blocks.popitem(last=False)
        return self._blocks[epoch, number]

    def _build(self, epoch: int, start: int) -> Numbers:
        """Compute the block at `start`. Its samples come from positions [start - window, stop + window)."""
        ends, firsts = self._shuffled_shards(epoch)
        stop = min(start + self.block, self.length)
        low, high = max(start - self.window, 0), min(stop + self.window, self.length)
        positions = np.arange(low, high, dtype=np.int64)
        shard = np.searchsorted(ends, positions, side="right")
        numbers = firsts[shard] + positions - np.where(shard > 0, ends[shard - 1], 0)
        key = mix(self.seed, ORDER, epoch)
        moved = positions + (hashed(low, high, key) % np.uint64(self.window)).astype(np.int64)
        block: Numbers = numbers[np.argsort(moved, kind="stable")][start - low : stop - low]
        return block

    def _shuffled_shards(self, epoch: int) -> tuple[Numbers, Numbers]:
        """Return, for the shards in the order of an epoch, where each ends, and the number of its first sample."""
        if self._shuffled is None or self._shuffled[0] != epoch:
            order = shuffled(len(self.counts), mix(self.seed, SHARDS, epoch))
            firsts = np.cumsum(self.counts) - self.counts
            self._shuffled = epoch, np.cumsum(self.counts[order]), firsts[order]
        return self._shuffled[1:]
