"""Sums over blocks of a timeline, `timeline/rank-N.blocks`, so that a long run can be read quickly.

A line of JSON sums up LINES lines of the timeline. It names their place in that file, so a reader finds the lines that
no block covers: those after the last block, and those that were in memory when a process was killed.

    {"bytes":[0,12032],"steps":[0,127],"n":128,"t":[1760000000.1,1760000012.9],"us":[...],"longest":110200,"wait":52000,"cpu":9100000,"gc":0,
     "loss":[2.1,5.6,2.3],"lr":[0.1,0.1,0.1],"samples":8192,"events":[{"t":1760000003.517,"checkpoint":20}]}

    bytes    first byte of the lines in the timeline, and the byte after the last one
    steps    the first line's step and the last one's; n: the number of steps
    t        the times of the first and the last line, in seconds since 1970
    us       microseconds in each phase; wait, cpu and gc, as in the timeline
    longest  microseconds of the longest line per step
    loss, lr, grad_norm, log   least, greatest and last value; log: by name
    samples, weight            sums
    events   the lines between them that are no steps
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from unisono.security.file_modes import open_like_folder

LINES = 128
"""Lines of a timeline in a block."""

SUMS = ("samples", "weight")
"""Fields of a line that are added up; of others, a block has the range."""


@dataclass(slots=True)
class Block:
    """The sums of the lines so far, with the fields of the file."""

    lines: int = 0
    n: int = 0
    partial: dict[str, int] = field(default_factory=dict)
    longest: int = 0
    first: tuple[int, float] = (0, 0.0)
    last: tuple[int, float] = (0, 0.0)
    us: list[int] = field(default_factory=list)
    ranges: dict[str, list[float]] = field(default_factory=dict)
    log: dict[str, list[float]] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)
    events: list[Mapping[str, Any]] = field(default_factory=list)

    def encode(self, start: int, end: int) -> str:
        """Return the line of this block, whose lines are the bytes [start, end) of the timeline."""
        (first, began), (last, ended) = self.first, self.last
        content: dict[str, Any] = {
            "bytes": [start, end],
            "steps": [first, last],
            "n": self.n,
            "t": [round(began, 3), round(ended, 3)],
            "us": self.us,
            "longest": self.longest,
            **self.partial,
            **self.ranges,
            **self.sums,
        }
        content |= {name: value for name, value in (("log", self.log), ("events", self.events)) if value}
        return json.dumps(content, separators=(",", ":")) + "\n"


class BlockWriter:
    """Appends the blocks of a timeline. Errors end it silently: a reader then reads the timeline instead.

    Args:
        path: The file.
        start: The place in the timeline of the next line.
    """

    def __init__(self, path: Path, start: int) -> None:
        self._path: Path | None = path
        self._start = self._end = start
        self._file: int | None = None
        self._whole: list[str] = []
        self._block = Block()

    def add(
        self,
        size: int,
        step: int,
        time: float,
        us: list[int],
        steps: int,
        partial: Mapping[str, int],
        loss: float | None,
        more: Mapping[str, float],
        log: Mapping[str, Any] | None,
    ) -> None:
        """Add a step's line of `size` bytes; the other arguments are its content."""
        block = self._block
        if not block.lines:
            block.first = step, time
        block.last = step, time
        block.lines += 1
        block.n += steps
        for name, value in partial.items():
            block.partial[name] = block.partial.get(name, 0) + value
        block.us = [a + b for a, b in zip_longest(block.us, us, fillvalue=0)]
        block.longest = max(block.longest, sum(us) // steps)
        if loss is not None:
            extend(block.ranges, "loss", loss)
        for name, number in more.items():
            if name in SUMS:
                block.sums[name] = block.sums.get(name, 0.0) + number
            else:
                extend(block.ranges, name, number)
        if log:
            for name, value in log.items():
                if isinstance(value, (int, float)):
                    extend(block.log, name, value)
        self._end += size
        if block.lines >= LINES:
            self._whole.append(block.encode(self._start, self._end))
            self._start, self._block = self._end, Block()

    def add_event(self, size: int, entry: Mapping[str, Any]) -> None:
        """Add a line of `size` bytes that is no step."""
        self._end += size
        self._block.events.append(entry)

    def flush(self) -> None:
        """Write the blocks that are complete. The lines of the timeline must be written before."""
        if not self._whole or self._path is None:
            return
        data = "".join(self._whole).encode()
        self._whole.clear()
        try:
            if self._file is None:
                self._file = open_like_folder(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
            while data:
                data = data[os.write(self._file, data) :]
        except OSError:
            self.close()

    def close(self) -> None:
        """Close the file. What is not a whole block is left out."""
        self._path = None
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                os.close(file)


def extend(ranges: dict[str, list[float]], name: str, value: float) -> None:
    """Extend the least, greatest and last value of a name. Values that are not finite are left out."""
    if not math.isfinite(value):
        return
    known = ranges.get(name)
    if known is None:
        ranges[name] = [value, value, value]
    else:
        known[2] = value
        if value < known[0]:
            known[0] = value
        elif value > known[1]:
            known[1] = value


def read_blocks(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the blocks of a timeline (`rank-N.blocks`). Lines that were cut off or damaged are skipped."""
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        for line in file:
            with contextlib.suppress(ValueError):
                block = json.loads(line)
                if isinstance(block, dict) and "bytes" in block:
                    yield block
