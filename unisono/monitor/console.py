"""What the library says while it works: Python's own logging, under the name "unisono".

`say` prints for rank 0 only, as it is. A record of the logger says its level, and its rank where there are several:

    8 virtual ranks: 2 processes, micro-batches of 8                          say(...)
    warning: rank 3: the timeline ends here (No space left on device)         logger.warning(...)

While a progress line is on the screen, both go through it and do not tear it.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from unisono.monitor.progress import Progress

logger = logging.getLogger("unisono")


class Formatter(logging.Formatter):
    """`warning: rank 3: text`; an info record has no level, a lone process no rank."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__("%(message)s")
        self._rank = f"rank {rank}: " if size > 1 else ""

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        return level + self._rank + super().format(record)


class RankHandler(logging.Handler):
    """Where this process's words go: to the stream, or through the progress line while there is one."""

    def __init__(self, rank: int, size: int, stream: TextIO | None) -> None:
        super().__init__()
        self.rank = rank
        self.progress: Progress | None = None
        self._stream = stream
        self.setFormatter(Formatter(rank, size))

    def emit(self, record: logging.LogRecord) -> None:
        self.print(self.format(record))

    def print(self, text: str) -> None:
        if self.progress is not None:
            self.progress.note(text)
            return
        # asked for at every line: whoever replaced sys.stdout meanwhile means us as well
        stream = self._stream or sys.stdout
        try:
            stream.write(text.rstrip("\n") + "\n")
            stream.flush()
        except (OSError, ValueError):  # nobody is listening any more; that must not stop a training
            pass


class BrokenPipeStream:
    """Standard output whose reader may leave (`python train.py | head`): a training goes on without listeners."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._to_nowhere()
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._to_nowhere()

    def _to_nowhere(self) -> None:
        """What is still in the buffer, and all that comes, goes where nobody minds."""
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, self._stream.fileno())
        os.close(nothing)


@contextmanager
def broken_pipe_safe() -> Iterator[None]:
    """A block whose standard output and error may lose their readers, or have none from the beginning (`>&-`)."""
    before = sys.stdout, sys.stderr
    for number in (1, 2):
        try:
            os.fstat(number)
        except OSError:  # or the next file that anybody opens would be taken for the screen
            nothing = os.open(os.devnull, os.O_WRONLY)
            if nothing != number:
                os.dup2(nothing, number)
                os.close(nothing)
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        out, err = BrokenPipeStream(before[0] or nowhere), BrokenPipeStream(before[1] or nowhere)
        sys.stdout, sys.stderr = out, err
        try:
            yield
        finally:
            out.flush()  # at exit it would be too late: Python itself is not patient
            sys.stdout, sys.stderr = before


_silent = RankHandler(0, 1, None)
_voice = _silent
_before = (logging.NOTSET, True)


def start(rank: int, size: int, stream: TextIO | None = None, *, level: int = logging.INFO) -> None:
    """From now on the logger speaks as this rank, to `stream` (None: standard output)."""
    global _voice, _before
    stop()
    _voice = RankHandler(rank, size, stream)
    _before = (logger.level, logger.propagate)
    logger.addHandler(_voice)
    logger.setLevel(level)
    logger.propagate = False  # or every line would come twice where a script calls logging.basicConfig


def stop() -> None:
    """Leave the logger as it was before `start`; stopping twice changes nothing."""
    global _voice
    if _voice is not _silent:
        logger.removeHandler(_voice)
        logger.setLevel(_before[0])
        logger.propagate = _before[1]
        _voice.close()
        _voice = _silent


def route_logging(progress: Progress | None) -> None:
    """From now on print through this progress line; None: straight to the stream again."""
    _voice.progress = progress


def print_line(text: str) -> None:
    """Print a line (or several) on rank 0, above the progress line; the other ranks are silent."""
    if _voice.rank == 0:
        _voice.print(text)
