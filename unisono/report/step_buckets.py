"""Downsample the rows of ranks to buckets of steps. The least and the greatest value of a bucket are kept."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from unisono.phases import PHASES
from unisono.report.rank_series import Floats, RankColumns

BUCKETS = 600
"""Points of a chart, about one for each pixel of its width on a phone, and for two on a wide screen."""


class Buckets(NamedTuple):
    """Intervals of steps: bucket i has the steps edges[i] to edges[i + 1] - 1."""

    edges: npt.NDArray[np.int64]

    @property
    def last(self) -> list[int]:
        """The last step of each bucket."""
        return [int(edge) - 1 for edge in self.edges[1:]]

    @property
    def size(self) -> int:
        """The number of buckets."""
        return len(self.edges) - 1

    def of(self, columns: RankColumns) -> npt.NDArray[np.int64]:
        """Return the bucket of each row: that of its last step."""
        return np.searchsorted(self.edges, columns.last, side="right").clip(1, max(self.size, 1)) - 1


def divide(columns: RankColumns, most: int = BUCKETS) -> Buckets:
    """Return buckets for the rows of a rank: at most `most`, with about equally many steps and at least one row."""
    if not len(columns.last):
        return Buckets(np.zeros(1, dtype=np.int64))
    first, ends = int(columns.first[0]), np.unique(columns.last.astype(np.int64)) + 1
    if len(ends) > most:
        wanted = np.linspace(first, int(ends[-1]), most + 1)[1:]
        ends = np.unique(ends[np.searchsorted(ends, wanted.round()).clip(max=len(ends) - 1)])
    return Buckets(np.concatenate([[min(first, int(ends[0]) - 1)], ends]))


class RankBuckets(NamedTuple):
    """The rows of a rank by bucket; nan where it has none.

    Attributes:
        seconds: Mean seconds of a step in each phase, [buckets, phases].
        wait: Mean seconds of waiting in a step, [buckets].
        longest: Seconds of the longest step, [buckets].
        time: The end of the last step, in seconds since 1970, [buckets].
        steps: The number of steps, [buckets].
    """

    seconds: Floats
    wait: Floats
    longest: Floats
    time: Floats
    steps: Floats

    @property
    def total(self) -> Floats:
        """Mean seconds of a step."""
        return self.seconds.sum(1)

    @property
    def own(self) -> Floats:
        """Mean seconds of a step without waiting for others, checkpoints and evaluations."""
        others = self.seconds[:, [PHASES.index("checkpoint"), PHASES.index("evaluate")]].sum(1)
        return np.maximum(self.total - self.wait - others, 0.0)


def rank_buckets(columns: RankColumns, buckets: Buckets) -> RankBuckets:
    """Return the times of a rank by bucket."""
    where, size = buckets.of(columns), buckets.size
    steps = np.bincount(where, columns.steps, size)[:size].astype(np.float64)
    divisor = np.where(steps > 0, steps, np.nan)
    seconds = [np.bincount(where, columns.seconds[:, i], size)[:size] / divisor for i in range(len(PHASES))]
    time, longest = np.full(size, np.nan), np.full(size, np.nan)
    np.fmax.at(longest, where, columns.longest)
    np.fmax.at(time, where, columns.time)
    return RankBuckets(
        np.stack(seconds, 1) if size else np.zeros((0, len(PHASES))),
        np.bincount(where, columns.wait, size)[:size] / divisor,
        longest,
        time,
        steps,
    )


def value_buckets(columns: RankColumns, name: str, buckets: Buckets) -> tuple[Floats, Floats, Floats]:
    """Return the least, the greatest and the last value of a name in each bucket, each [buckets]; nan: none."""
    low, high, last = (np.full(buckets.size, np.nan) for _ in range(3))
    values, where = columns.values[name], buckets.of(columns)
    known = ~np.isnan(values[:, 2])
    np.fmin.at(low, where[known], values[known, 0])
    np.fmax.at(high, where[known], values[known, 1])
    last[where[known]] = values[known, 2]  # of several rows of a bucket, the last one stays
    return low, high, last


def sum_buckets(columns: RankColumns, values: Floats, buckets: Buckets) -> Floats:
    """Return the sum of a column in each bucket, [buckets]."""
    return np.bincount(buckets.of(columns), np.nan_to_num(values), buckets.size)[: buckets.size].astype(np.float64)
