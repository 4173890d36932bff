"""Record numbers in `RUN/metrics.csv`: a row for each number, in the long form that spreadsheets and pandas read.

step,time,name,value
12,1760000000.123,loss,2.3
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from unisono.security.file_modes import open_like_folder
from unisono.trackers.tracker import Media, TrackedRun

HEADER = ("step", "time", "name", "value")


class CsvFile:
    """Append to metrics.csv. All rows of a step are one write, so a kill does not divide them."""

    def start(self, run: TrackedRun) -> int:
        self._file: Any = open(run.dir / "metrics.csv", "a+b", buffering=0, opener=open_like_folder)  # noqa: SIM115  (closed in finish)
        last, whole = _last_whole_step(self._file)
        self._file.truncate(whole)
        if not whole:
            self._write([HEADER])
        return last

    def log(self, step: int, time: float, numbers: Mapping[str, float]) -> None:
        self._write([(step, f"{time:.3f}", name, value) for name, value in numbers.items()])

    def log_media(self, step: int, time: float, media: Media) -> None:
        """Do nothing: a table of numbers has no place for them."""

    def flush(self) -> None:
        """Do nothing: all is written."""

    def finish(self, result: Mapping[str, Any]) -> None:
        self._file.close()

    def _write(self, rows: Iterable[Iterable[Any]]) -> None:
        lines: list[str] = []
        # this lineterminator lets Python 3.11 quote a name with \r; the file itself has \n
        csv.writer(SimpleNamespace(write=lines.append), lineterminator="\r\n").writerows(rows)
        text = "".join(line.removesuffix("\r\n") + "\n" for line in lines)
        self._file.write(text.encode(errors="backslashreplace"))  # half a surrogate pair has no bytes


def _last_whole_step(file: Any) -> tuple[int, int]:
    """Return the last step whose rows are all there, and the number of bytes up to its end.

    A crash of the machine, or a full disk, may have cut off the last row. Its step is dropped then.
    """
    file.seek(0)
    before, whole, step, end = -1, 0, -1, 0  # the step before the last one and its end; the last one and its end
    for row, complete in _rows(file.read()):
        if not complete:
            return before, whole
        head = row.partition(b",")[0]
        number = int(head) if head.isdigit() else -1
        if number != step:
            before, whole, step = step, end, number
        end += len(row)
    return step, end


def _rows(data: bytes) -> Iterator[tuple[bytes, bool]]:
    """Yield the rows, each with its end, and whether it is complete: the last one may be cut off.

    A quoted name may contain ends of lines. Quotes within it are doubled. So a row has an even number of quotes.
    """
    begin = end = quotes = 0
    while (line := data.find(b"\n", end)) >= 0:
        quotes += data.count(b'"', end, line)
        end = line + 1
        if quotes % 2 == 0:
            yield data[begin:end], True
            begin = end
    if begin < len(data):
        yield data[begin:], False
