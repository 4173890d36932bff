"""Messages of the library: Python's logging, with a logger named "unisono".

`print_line` prints on rank 0 only. A record of the logger is printed with its level, and with its rank if there are
several:

    8 virtual ranks: 2 processes, micro-batches of 8                          print_line(...)
    warning: rank 3: the timeline ends here (No space left on device)         logger.warning(...)

While a progress line is on the screen, both are printed above it.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from unisono.monitor.progress import Progress
from unisono.monitor.stream_text import write_text

logger = logging.getLogger("unisono")


class Formatter(logging.Formatter):
    """Format a record as `warning: rank 3: text`; without the level if it is info, without the rank of one process."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__("%(message)s")
        self._rank = f"rank {rank}: " if size > 1 else ""

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        return level + self._rank + super().format(record)


class RankHandler(logging.Handler):
    """Prints the messages of this process to a stream, or above the progress line if there is one."""

    def __init__(self, rank: int, size: int, stream: TextIO | None) -> None:
        super().__init__()
        self.rank = rank
        self.progress: Progress | None = None
        self._stream = stream
        self.setFormatter(Formatter(rank, size))

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record."""
        self.print(self.format(record))

    def print(self, text: str) -> None:
        """Print text on lines of its own. Errors of the stream are ignored, so that training continues."""
        if self.progress is not None:
            self.progress.note(text)
            return
        # looked up for every line, because a script may have replaced sys.stdout
        stream = self._stream or sys.stdout
        with suppress(OSError, ValueError):  # closed
            write_text(stream, text.rstrip("\n") + "\n")


class BrokenPipeStream:
    """A stream that discards output once its reader is gone (`python train.py | head`), so that training continues."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.reader_is_gone = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write text."""
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._discard()
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write lines."""
        self.write("".join(lines))

    def flush(self) -> None:
        """Flush the stream."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._discard()

    def _discard(self) -> None:
        """Redirect the file descriptor to the null device: the buffer's content, and all later output."""
        self.reader_is_gone = True
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)


@contextmanager
def broken_pipe_safe() -> Iterator[None]:
    """Run a block whose standard output and error may lose their readers, or be closed from the beginning (`>&-`)."""
    before = sys.stdout, sys.stderr
    for number in (1, 2):
        try:
            os.fstat(number)
        except OSError:  # closed: the next file that is opened would get the number of the screen
            null = os.open(os.devnull, os.O_WRONLY)
            if null != number:
                os.dup2(null, number)
                os.close(null)
    with open(os.devnull, "w", encoding="utf-8") as null_stream:
        out, err = BrokenPipeStream(before[0] or null_stream), BrokenPipeStream(before[1] or null_stream)
        sys.stdout, sys.stderr = out, err
        try:
            yield
        finally:
            out.flush()  # at exit Python would report a broken pipe
            sys.stdout, sys.stderr = before


_default = RankHandler(0, 1, None)
_handler = _default
_before = (logging.NOTSET, True)


def start(rank: int, size: int, stream: TextIO | None = None, *, level: int = logging.INFO) -> None:
    """Print the logger's records as this rank from now on, to `stream` (None: standard output)."""
    global _handler, _before
    stop()
    _handler = RankHandler(rank, size, stream)
    _before = (logger.level, logger.propagate)
    logger.addHandler(_handler)
    logger.setLevel(level)
    logger.propagate = False  # otherwise lines come twice after logging.basicConfig


def stop() -> None:
    """Restore the logger as it was before `start`. Stopping twice changes nothing."""
    global _handler
    if _handler is not _default:
        logger.removeHandler(_handler)
        logger.setLevel(_before[0])
        logger.propagate = _before[1]
        _handler.close()
        _handler = _default


def route_logging(progress: Progress | None) -> None:
    """Print above this progress line from now on; None: print to the stream."""
    _handler.progress = progress


def print_line(text: str) -> None:
    """Print text on rank 0, above the progress line. Other ranks print nothing."""
    if _handler.rank == 0:
        _handler.print(text)
