"""Read the timeline of a rank as columns: a row for each line, or for each block of lines in a long timeline.

A timeline of 1,000,000 steps is read from its blocks (monitor/timeline_blocks.py) in about 60 ms. Lines that no block
covers are read from the timeline itself. A reader keeps its place, so the page of a running job reads only new lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from unisono.monitor.timeline import as_number
from unisono.monitor.timeline_blocks import read_blocks
from unisono.monitor.valid_lines import is_valid, is_valid_block, valid_line
from unisono.phases import PHASES

WHOLE_BYTES = 4 << 20
"""Largest timeline that is read line by line; about 35,000 lines."""

Floats = npt.NDArray[np.float64]
Range = tuple[float, float, float]
"""Least, greatest and last value."""

NAN = float("nan")
NO_RANGE: Range = (NAN, NAN, NAN)


class Row(NamedTuple):
    """Consecutive steps of a rank: those of a line, or of a block of lines.

    Attributes:
        first: The first step, and `last`, the last one.
        steps: The number of steps.
        time: The end of the last step, in seconds since 1970.
        seconds: In each phase, in the order of `phases.PHASES`.
        wait: Seconds of waiting for messages.
        cpu: Seconds in which the training thread was running.
        gc: Seconds in collections of Python's oldest generation.
        longest: Seconds of the longest step, of several steps in a line their mean.
        samples: Samples of these steps over all processes; nan: unknown.
        weight: Their weight; nan: that is the number of samples.
        values: The ranges of loss, lr and grad_norm, and of logged values ("log.NAME").
    """

    first: int
    last: int
    steps: int
    time: float
    seconds: tuple[float, ...]
    wait: float
    cpu: float
    gc: float
    longest: float
    samples: float
    weight: float
    values: Mapping[str, Range]


class RankSeries:
    """The timeline of a rank.

    Args:
        path: The timeline, `RUN/timeline/rank-N.jsonl`.
        rank: The rank.

    Attributes:
        rows: In the order of steps. After a resume, steps that were computed again are there once.
        events: The lines that are no steps, in the order of the file.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self.path, self.rank = path, rank
        self.rows: list[Row] = []
        self.events: list[dict[str, Any]] = []
        self._at = 0  # bytes that were read
        self._sources: list[tuple[int, int]] = []  # the bytes of each row
        self._columns: RankColumns | None = None  # of the rows, until more are read

    def read(self) -> bool:
        """Read what is new. Return whether there was anything. A file that cannot be read has nothing new."""
        try:
            return self._read(self.path.stat().st_size)
        except OSError:
            return False

    def _read(self, size: int) -> bool:
        if size <= self._at:
            return False
        self._columns = None
        if size - self._at > WHOLE_BYTES:
            for block in read_blocks(self.path.with_suffix(".blocks")):
                if not is_valid_block(block):
                    continue
                start, end = block["bytes"]
                if start < self._at or end > size:
                    continue
                self._read_lines(self._at, start)
                for event in block.get("events", ()):
                    if is_valid(event):
                        self._add_event(event)
                self._add(_row_of_block(block), (start, end))
                self._at = end
        self._read_lines(self._at, size)
        return True

    def _read_lines(self, start: int, end: int) -> None:
        """Add the lines in these bytes of the timeline. A line that has no end yet is left for later."""
        if end <= start:
            return
        with self.path.open("rb") as file:
            file.seek(start)
            data = file.read(end - start)
        whole = data.rfind(b"\n") + 1
        at = start
        for line in data[:whole].splitlines(keepends=True):
            entry = valid_line(line)
            if entry is None:
                pass
            elif "seconds" in entry:
                self._add(_row_of_line(entry), (at, at + len(line)))
            else:
                self._add_event(entry)
            at += len(line)
        self._at = start + whole

    def _add(self, row: Row | None, source: tuple[int, int]) -> None:
        if row is not None:
            self.rows.append(row)
            self._sources.append(source)

    def _add_event(self, event: Mapping[str, Any]) -> None:
        """Add an event. After a resume, drop the steps that are computed again."""
        self.events.append(dict(event))
        again = event.get("resumed_at")
        if not isinstance(again, int):
            return
        while self.rows and self.rows[-1].last >= again:
            row, (start, end) = self.rows.pop(), self._sources.pop()
            if row.first < again and row.steps > 1:  # a block, a part of which stays
                with self.path.open("rb") as file:
                    file.seek(start)
                    lines = file.read(end - start).splitlines()
                entries = [entry for entry in map(valid_line, lines) if entry is not None and "seconds" in entry]
                for entry in entries:
                    if entry["step"] < again:
                        self._add(_row_of_line(entry), (start, start))
                return

    def columns(self) -> RankColumns:
        """Return the rows as arrays."""
        if self._columns is None:
            self._columns = columns_of(self.rank, self.rows)
        return self._columns

    @property
    def start(self) -> Mapping[str, Any]:
        """The newest event "start"; empty if there is none."""
        return next((event for event in reversed(self.events) if event.get("event") == "start"), {})


class RankColumns(NamedTuple):
    """The rows of a rank as arrays: [rows], `seconds` [rows, phases], and each of `values` [rows, 3]."""

    rank: int
    first: Floats
    last: Floats
    steps: Floats
    time: Floats
    seconds: Floats
    wait: Floats
    cpu: Floats
    gc: Floats
    longest: Floats
    samples: Floats
    weight: Floats
    values: Mapping[str, Floats]


def columns_of(rank: int, rows: Sequence[Row]) -> RankColumns:
    """Return rows as arrays."""
    names = dict.fromkeys(name for row in rows for name in row.values)
    return RankColumns(
        rank=rank,
        first=_array(row.first for row in rows),
        last=_array(row.last for row in rows),
        steps=_array(row.steps for row in rows),
        time=_array(row.time for row in rows),
        seconds=np.array([row.seconds for row in rows], dtype=np.float64).reshape(len(rows), len(PHASES)),
        wait=_array(row.wait for row in rows),
        cpu=_array(row.cpu for row in rows),
        gc=_array(row.gc for row in rows),
        longest=_array(row.longest for row in rows),
        samples=_array(row.samples for row in rows),
        weight=_array(row.weight for row in rows),
        values={name: np.array([row.values.get(name, NO_RANGE) for row in rows], dtype=np.float64) for name in names},
    )


def main_columns(ranks: Mapping[int, RankSeries]) -> RankColumns:
    """Return the rows of the main processes, which have the numbers of the run.

    Rank 0 writes them, and after its death another rank. A resume drops the steps that are computed again. If no rank
    has written numbers, the rows are those of the rank that came farthest.
    """
    found = {rank: series for rank, series in ranks.items() if any(row.samples == row.samples for row in series.rows)}
    if len(found) < 2:
        farthest = max(found or ranks, key=lambda rank: (ranks[rank].rows[-1].last if ranks[rank].rows else -1, -rank))
        return ranks[farthest].columns()
    rows = sorted(
        ((row, rank) for rank, series in found.items() for row in series.rows if row.samples == row.samples),
        key=lambda each: each[0].time,
    )
    kept: list[tuple[Row, int]] = []
    for row, rank in rows:
        while kept and kept[-1][0].last >= row.first:
            kept.pop()
        kept.append((row, rank))
    return columns_of(kept[-1][1], [row for row, _ in kept])


def present(ranks: Mapping[int, RankSeries]) -> list[int]:
    """Return the ranks with steps that are part of the run now, or were at its end.

    A rank has left if the run has started again after its last step, or if others report its death.
    """
    begun = {rank: series for rank, series in ranks.items() if series.rows}
    newest = max((float(series.start.get("t", 0.0)) for series in ranks.values()), default=0.0)
    dead = {
        (rank, float(event.get("t", 0.0)))
        for series in ranks.values()
        for event in series.events
        if event.get("event") == "death"
        for rank in event.get("ranks", ())
    }
    found = [
        rank
        for rank, series in begun.items()
        if series.rows[-1].time >= newest
        and not any(rank == other and when >= float(series.start.get("t", 0.0)) for other, when in dead)
    ]
    return found or list(begun)


def _array(values: Iterator[float]) -> Floats:
    return np.fromiter(values, dtype=np.float64)


def _row_of_line(entry: Mapping[str, Any]) -> Row | None:
    """Return the row of a step's line; None if it is damaged."""
    try:
        spent = entry["seconds"]
        seconds = tuple(float(spent.get(phase, 0.0)) for phase in PHASES)
        count, step = int(entry.get("n", 1)), int(entry["step"])
        values = {
            name: (number, number, number)
            for name in ("loss", "lr", "grad_norm")
            if (number := as_number(entry.get(name))) is not None
        }
        for name, value in entry.get("log", {}).items():
            if (number := as_number(value)) is not None:
                values[f"log.{name}"] = (number, number, number)
        return Row(
            step - count + 1,
            step,
            count,
            float(entry["t"]),
            seconds,
            float(entry.get("wait", 0.0)),
            float(entry.get("cpu", 0.0)),
            float(entry.get("gc", 0.0)),
            sum(seconds) / count,
            float(entry.get("samples", NAN)),
            float(entry.get("weight", NAN)),
            values,
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _row_of_block(block: Mapping[str, Any]) -> Row | None:
    """Return the row of a block; None if it is damaged."""
    try:
        first, last = block["steps"]
        spent: Sequence[float] = block["us"]
        named = {name: block[name] for name in ("loss", "lr", "grad_norm") if name in block}
        named |= {f"log.{name}": value for name, value in block.get("log", {}).items()}
        return Row(
            int(first),
            int(last),
            int(block["n"]),
            float(block["t"][1]),
            tuple(us / 1e6 for us, _ in zip_longest(spent, PHASES, fillvalue=0.0)),
            block.get("wait", 0) / 1e6,
            block.get("cpu", 0) / 1e6,
            block.get("gc", 0) / 1e6,
            block["longest"] / 1e6,
            float(block.get("samples", NAN)),
            float(block.get("weight", NAN)),
            {name: (float(low), float(high), float(end)) for name, (low, high, end) in named.items()},
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
