"""Read the log of a rank, with the time of each line."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from unisono.launcher.rank_log import LogMark, read_mark, times_path
from unisono.launcher.rank_logging import RecordHead, read_head, stamp
from unisono.monitor.stream_text import visible
from unisono.trackers.growing_file import GrowingFile

FAR_SECONDS = 86_400.0
"""Longest time between a record and its arrival. It covers the time zones of two machines."""


class LogLine(NamedTuple):
    """A line of a log.

    Attributes:
        order: Its place among the lines of all ranks: a time that never decreases in a log.
        time: When it arrived, in seconds since 1970; 0: unknown.
        rank: The rank, or the number of the process.
        text: The line.
        end: The end of the process that is at this place instead of a line.
        head: Its beginning, if it is the first line of a record of this rank.
    """

    order: float
    time: float
    rank: int
    text: str
    end: LogMark | None = None
    head: RecordHead | None = None

    def shown(self) -> str:
        """Return the line for a terminal, with time and rank if it does not begin with them.

        Control characters are shown, not sent.
        """
        when = stamp(self.time) + " " if self.time else ""
        if self.end is not None:
            return f"{when}rank {self.rank} {self.end}"
        text = visible(self.text)
        return text if self.head is not None else f"{when}rank {self.rank}: {text}"

    def as_json(self) -> str:
        """Return the line as a JSON object."""
        content: dict[str, object] = {"time": self.time or None, "rank": self.rank}
        if self.end is not None:
            return json.dumps({**content, "end": str(self.end), "status": self.end.status})
        if (head := self.head) is not None:
            content |= {"time": head.time, "step": head.step, "level": head.level, "logger": head.logger}
        return json.dumps({**content, "text": self.text})


class LogReader:
    """The lines of a log, each once, while it may grow.

    Args:
        path: The log. Its marks are beside it; without them only records have a time.
        rank: Its rank.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self.rank = rank
        self._log, self._marks = GrowingFile(path), GrowingFile(times_path(path))
        self._waiting = deque[LogMark]()  # marks of lines that are not read yet
        self._place = 0
        self._arrived = 0.0  # of the mark of the present lines; 0: there is none
        self._now = 0.0  # of the mark, or of the records before
        self._order = 0.0

    def new_lines(self, *, last: bool = False) -> Iterator[LogLine]:
        """Yield the lines since the last call, and the ends of processes that died.

        Args:
            last: Yield also a line at the end that is not complete.
        """
        while lines := self._log.lines():
            for line in lines:
                yield from self._ends_up_to(self._place)
                yield self._line(line)
                self._place += len(line) + 1
        if last and self._log.rest:
            yield from self._ends_up_to(self._place)
            yield self._line(self._log.rest)
        yield from self._ends_up_to(self._place)

    def _line(self, line: bytes) -> LogLine:
        """Return a line with its time: that of a record is when it was made, a little before it arrived."""
        text = line.decode(errors="replace").rstrip("\r")
        head = self._believed(read_head(text))
        when = self._now if head is None else head.time
        if not self._arrived:  # a log without marks
            self._now = max(self._now, when)
        self._order = max(self._order, when)
        return LogLine(self._order, when, self.rank, text, head=head)

    def _believed(self, head: RecordHead | None) -> RecordHead | None:
        """Return the head of a record, unless a script has printed it: for another rank, or a time far from arrival."""
        if head is None or head.rank != self.rank:
            return None
        if self._arrived:
            return head if abs(head.time - self._arrived) <= FAR_SECONDS else None
        return head if head.time <= time.time() + FAR_SECONDS else None

    def _ends_up_to(self, place: int) -> Iterator[LogLine]:
        """Read the marks up to this byte of the log. Yield those of processes that died."""
        while True:
            if not self._waiting:
                self._waiting.extend(found for line in self._marks.lines() if (found := read_mark(line)) is not None)
            if not self._waiting or self._waiting[0].place > place:
                return
            mark = self._waiting.popleft()
            if mark.word not in ("ended", "failed", "stopped"):  # after which no line comes, or a traceback of before
                self._arrived = self._now = max(self._now, mark.time)
            if mark.word == "died":
                self._order = max(self._order, self._now)
                yield LogLine(self._order, mark.time, self.rank, "", mark)
