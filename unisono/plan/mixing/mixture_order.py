"""The order of samples of a mixture of several sources.

A step draws a number of samples from each source (draw_counts.py), at places of its batch that a key shuffles. Each
source has an order of its own: its samples in epochs that begin again when they are over. So which source sample k of
the run is from, and which of its samples it is, follows from the seed, the weights and k.

    step      0            1            2                     sources a (5 samples), b (2 samples), weights 3 : 1
    batch     a a b a      a b a a      a a a b
              0 1 0 2      3 1 4 0      1 2 3 0               the draw of each source, modulo its length
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unisono.plan.mixing.draw_counts import DrawCounts, WeightSchedule
from unisono.plan.ordering.window_shuffle import WindowShuffle
from unisono.plan.rng_keys import MIXTURE, ORDER, mix, shuffled

Numbers = npt.NDArray[np.int64]
KEPT = 4
"""Steps, and permutations of a source, that are cached."""


@dataclass(frozen=True)
class SourceLayout:
    """How the samples of a data set are stored.

    Attributes:
        length: number of samples.
        shards: samples in each shard, for data in shards.
        window: with shards, a sample is moved by fewer places than this.
    """

    length: int
    shards: tuple[int, ...] = ()
    window: int = 1


@dataclass(frozen=True)
class Mixing:
    """The sources of a mixture, and the weights by which they are drawn."""

    sources: tuple[SourceLayout, ...]
    schedule: WeightSchedule


class SourceOrder:
    """The samples of one source in the order in which they are drawn, epoch after epoch."""

    def __init__(self, layout: SourceLayout, seed: int, *, shuffle: bool) -> None:
        self.layout, self.seed, self.shuffle = layout, seed, shuffle
        self._windows = WindowShuffle(layout.shards, layout.window, seed) if layout.shards else None
        self._permutations: OrderedDict[int, Numbers] = OrderedDict()

    def draws(self, start: int, stop: int) -> Numbers:
        """Return the sample numbers of the draws [start, stop)."""
        parts = []
        while start < stop:
            epoch, first = divmod(start, self.layout.length)
            last = min(first + stop - start, self.layout.length)
            parts.append(self._part(epoch, first, last))
            start += last - first
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def _part(self, epoch: int, start: int, stop: int) -> Numbers:
        if not self.shuffle:
            return np.arange(start, stop, dtype=np.int64)
        if self._windows is not None:
            return self._windows.part(epoch, start, stop)
        if epoch not in self._permutations:
            self._permutations[epoch] = shuffled(self.layout.length, mix(self.seed, ORDER, epoch))
            if len(self._permutations) > KEPT:
                self._permutations.popitem(last=False)
        return self._permutations[epoch][start:stop]


class MixtureOrder:
    """The samples of each step of a mixture. Sample numbers run through its sources in order.

    Args:
        mixing: the sources and weights.
        samples: returns the number of samples of the whole run before a step.
        seed: of the run.
        shuffle: whether each source is shuffled. Places in a batch always are.
    """

    def __init__(self, mixing: Mixing, samples: Callable[[int], int], seed: int, *, shuffle: bool) -> None:
        self.counts = DrawCounts(len(mixing.sources), mixing.schedule, samples)
        self.seed, self.firsts = seed, np.cumsum([0, *(source.length for source in mixing.sources)])
        self.sources = [
            SourceOrder(source, mix(seed, MIXTURE, number), shuffle=shuffle)
            for number, source in enumerate(mixing.sources)
        ]
        self._steps: OrderedDict[int, Numbers] = OrderedDict()

    def step(self, step: int) -> Numbers:
        """Return the sample numbers of a step's batch, in order."""
        if step not in self._steps:
            self._steps[step] = self._build(step)
            if len(self._steps) > KEPT:
                self._steps.popitem(last=False)
        return self._steps[step]

    def _build(self, step: int) -> Numbers:
        before, after = self.counts.before(step), self.counts.before(step + 1)
        drawn = [
            source.draws(start, stop) + first
            for source, start, stop, first in zip(self.sources, before, after, self.firsts[:-1], strict=True)
        ]
        source_of = np.repeat(np.arange(len(drawn)), [len(numbers) for numbers in drawn])
        places = np.argsort(source_of[shuffled(len(source_of), mix(self.seed, MIXTURE, step, -1))], kind="stable")
        numbers = np.empty(len(source_of), dtype=np.int64)
        numbers[places] = np.concatenate(drawn)  # each source keeps its order
        return numbers
