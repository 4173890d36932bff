"""A mixture: samples of several data sets, drawn by weights that may change with the step."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from unisono.config.wording import nearest_name
from unisono.data.prepared import OnError, PreparedDataset, layout_of, prepare, read_samples
from unisono.distributed.process_group import ProcessGroup
from unisono.errors import DataError
from unisono.plan.mixing.draw_counts import UNIT, WeightFunction, Weights, WeightSchedule, WeightTable, whole_weights
from unisono.plan.mixing.mixture_order import Mixing, SourceLayout

Row = Mapping[str, float] | Sequence[float]
"""A weight for each source, by name or in order."""

PROBES = (*range(64), *(round(64 * 1.25**i) for i in range(64)))
"""Steps at which the weights of a function are compared with those of a resumed run: up to 80 million."""

EXAMPLE = "unisono.Mixture({'web': web, 'code': code}, weights={'web': 0.8, 'code': 0.2})"


class Mixture(PreparedDataset):
    """A data set that draws the samples of a batch from several others. Pass it to `run.steps` like any other.

    A source that is used up begins again, in another order. An epoch of a mixture has as many samples as its sources
    have together. `run.evaluate` and `run.predict` read every sample of every source once, and ignore the weights.

    Args:
        sources: the data sets by name, or in a list: map-style data sets, Streams, Packed ones.
        weights: shares of the samples, which need not add up to 1. Either one for each source (a dict by name, or a
            list), or a dict {step: such weights}, each of which holds from that step on, or a function of the step
            that returns such weights. The function must be pure: its value depends on the step alone.
    """

    def __init__(
        self,
        sources: Mapping[str, Any] | Sequence[Any],
        weights: Row | Mapping[int, Row] | Callable[[int], Row],
    ) -> None:
        self.sources = dict(sources) if isinstance(sources, Mapping) else {str(i): s for i, s in enumerate(sources)}
        if not self.sources:
            raise DataError("A mixture needs at least one source.", "It got none.", EXAMPLE)
        for name, source in self.sources.items():
            if isinstance(source, Mixture):
                fact = f"The source {name} is a mixture itself."
                raise DataError("A mixture cannot be a source.", fact, "pass all its sources to one mixture.")
            if not hasattr(source, "__getitem__") or not hasattr(source, "__len__"):
                raise DataError(
                    f"The source {name} of a mixture is not a map-style data set.",
                    f"A {type(source).__name__} lacks __len__ or __getitem__, and a mixture needs sample numbers.",
                    "pass a data set with both, or a unisono.Stream.",
                )
        self.schedule = self._schedule(weights)
        self._firsts: list[int] | None = None  # the number of the first sample of each source, and their total

    def _schedule(self, weights: Any) -> WeightSchedule:
        if callable(weights):
            return WeightFunction(partial(self._of_function, weights))
        if isinstance(weights, Mapping) and weights and all(isinstance(step, int) for step in weights):
            steps = sorted(weights)
            if steps[0] != 0:
                fact = f"The first weights hold from step {steps[0]} on."
                raise DataError("The weights of a mixture must begin at step 0.", fact, "weights={0: {...}, ...}")
            return WeightTable(tuple(steps), tuple(self._row(weights[step], f"from step {step} on") for step in steps))
        return WeightTable((0,), (self._row(weights, ""),))

    def _of_function(self, weights: Callable[[int], Row], step: int) -> Weights:
        return self._row(weights(step), f"at step {step}")

    def _row(self, row: Any, when: str) -> Weights:
        """Return one row of weights in whole units. Raises DataError."""
        names = list(self.sources)
        if isinstance(row, Mapping):
            if unknown := [name for name in row if name not in self.sources]:
                near = nearest_name(str(unknown[0]), names)
                fact = f"The sources are {', '.join(names)}."
                do = f"weights={{{near!r}: ...}}" if near else EXAMPLE
                raise DataError(f"The mixture has no source {unknown[0]!r}, but a weight of it {when}.", fact, do)
            row = [row.get(name, 0.0) for name in names]
        try:
            values = [float(weight) for weight in row]
            if len(values) != len(names):
                raise ValueError(f"There are {len(values)} weights")
            return whole_weights(values)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"A mixture of {len(names)} sources cannot have the weights {row!r} {when}".rstrip() + ".",
                f"{error}. Each source needs a finite weight of at least 0, and one of them more than 0.",
                EXAMPLE,
            ) from None

    # -- a prepared data set

    def prepare(self, group: ProcessGroup, on_error: OnError, note: Callable[[str], None]) -> None:
        """Prepare the data: see PreparedDataset. Collective."""
        for source in self.sources.values():
            prepare(source, group, on_error, note)
        self._firsts = None
        self._check_lengths()

    def _check_lengths(self) -> None:
        """Raise DataError if an empty source has a weight."""
        rows = self.schedule.rows if isinstance(self.schedule, WeightTable) else (self.schedule.at(0),)
        for number, (name, source) in enumerate(self.sources.items()):
            if not len(source) and any(row[number] for row in rows):
                raise DataError(
                    f"The source {name} of a mixture has no samples.",
                    f"Its weight is {max(row[number] for row in rows) / UNIT:.3g}.",
                    "check its path, or give it the weight 0.",
                )

    def _starts(self) -> list[int]:
        if self._firsts is None:
            self._firsts = np.cumsum([0, *map(len, self.sources.values())]).tolist()
        return self._firsts

    def __len__(self) -> int:
        return self._starts()[-1]

    @property
    def shape(self) -> str:
        """Describe everything that the order of the samples depends on."""
        parts = [
            f"{name}: {source.shape if isinstance(source, PreparedDataset) else f'{len(source)} samples'}"
            for name, source in self.sources.items()
        ]
        rows = self.schedule if isinstance(self.schedule, WeightTable) else [*map(self._probe, PROBES)]
        digest = hashlib.sha256(repr(rows).encode()).hexdigest()[:8]
        return f"a mixture of {'; '.join(parts)}; with weights {digest}"

    def _probe(self, step: int) -> Weights | str:
        try:
            return self.schedule.at(step)
        except Exception as error:  # a list that is indexed after the last step of the run, say
            return type(error).__name__

    def layout(self) -> SourceLayout:
        """Return how the samples are stored."""
        return SourceLayout(len(self))

    def mixing(self) -> Mixing:
        """Return the sources and their weights."""
        return Mixing(tuple(map(layout_of, self.sources.values())), self.schedule)

    def _parts(self, numbers: Sequence[int]) -> dict[int, list[int]]:
        """Return the numbers within each source, for the sources that these samples are from, in order."""
        starts, parts = self._starts(), dict[int, list[int]]()
        places = np.searchsorted(starts, np.asarray(numbers, dtype=np.int64), side="right") - 1
        for number, source in sorted(zip(numbers, places.tolist(), strict=True), key=lambda pair: pair[1]):
            parts.setdefault(source, []).append(number - starts[source])
        return parts

    def read(self, numbers: Sequence[int]) -> Mapping[int, Any]:
        """Return the samples of these numbers, without those that are damaged and skipped."""
        sources, starts = list(self.sources.values()), self._starts()
        found: dict[int, Any] = {}
        for source, local in self._parts(numbers).items():
            samples = read_samples(sources[source], local)
            found |= {starts[source] + number: sample for number, sample in samples.items()}
        return found

    def name_of(self, number: int) -> str:
        """Return where a sample is stored, for messages."""
        ((source, (local,)),) = self._parts([number]).items()
        name, data = list(self.sources.items())[source]
        within = f", {data.name_of(local)}" if isinstance(data, PreparedDataset) else f", sample {local}"
        return f"the source {name}{within}"
