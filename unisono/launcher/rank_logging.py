"""Add time, rank and step to what logging and warnings print in the process of a rank.

    2026-01-02 03:04:05.678 rank 2 step 17 WARNING transformers: text

This is the form of records without a handler of the script (logging.lastResort), of a library whose own handler prints
no time, and of warnings. A script that configures logging (basicConfig, dictConfig, handlers, captureWarnings) keeps
its own form. All of it goes to standard error, which our launcher writes to the log of the rank. Under another launcher
it is appended to RUN/log/rank-N.log here, and warnings are printed by rank 0 only.

A warning in several loader workers is printed by the first of them, and is in the log for each.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import multiprocessing
import os
import re
import sys
import sysconfig
import time
import warnings
import zlib
from collections.abc import Iterator
from multiprocessing.synchronize import Lock
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from unisono import phases
from unisono.launcher import failure_record
from unisono.security.file_modes import make_folder, open_like_folder

WARNINGS = "py.warnings"
"""The name of the logger of warnings, as of logging.captureWarnings."""

HEAD = re.compile(
    r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}) rank (\d{1,9})(?: step (\d{1,18}))? "
    r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) (.*?): ",
    re.ASCII,
)
"""The beginning of a record."""


CONTINUED = "  "
"""The beginning of a record's other lines."""


class RecordHead(NamedTuple):
    """What the beginning of a record says."""

    time: float
    rank: int
    step: int | None
    level: str
    logger: str


def stamp(when: float) -> str:
    """Return a time as 2026-01-02 03:04:05.678, in the time zone of this process."""
    milliseconds = round(when * 1000)
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(milliseconds // 1000))}.{milliseconds % 1000:03}"


def read_head(line: str) -> RecordHead | None:
    """Return the head of the record that begins with this line, or None if the line is something else."""
    found = HEAD.match(line)
    if found is None:
        return None
    moment, milliseconds = found[1].split(".")
    try:
        seconds = time.mktime(time.strptime(moment, "%Y-%m-%d %H:%M:%S"))
    except (ValueError, OverflowError):
        return None
    step = int(found[3]) if found[3] else None
    return RecordHead(seconds + int(milliseconds) / 1000, int(found[2]), step, found[4], found[5])


class RecordFormatter(logging.Formatter):
    """Format a record with time, rank, step, level and logger."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record, with its traceback."""
        return self.join(record.created, record.levelname, record.name, super().format(record))

    def join(self, when: float, level: str, logger: str, text: str) -> str:
        """Return a record of these parts. Lines after the first one are indented."""
        step = phases.position.step
        at = "" if step is None else f" step {step}"
        return f"{stamp(when)} rank {self._rank}{at} {level} {logger}: {text}".replace("\n", f"\n{CONTINUED}")


MANY_WARNINGS = 1000
"""Number of warnings of a process that are remembered."""


class SeenWarnings:
    """The warnings that this process and its forked children have printed: bits in memory that they share.

    Neither the memory nor the lock is a file descriptor, which a script might close.
    """

    BYTES = 4096
    LOCK_SECONDS = 1.0

    def __init__(self) -> None:
        self._bits = mmap.mmap(-1, self.BYTES)
        self._lock: Lock | None = None
        with contextlib.suppress(OSError):  # no room in /dev/shm; then two workers may print the same warning
            self._lock = multiprocessing.get_context("fork").Lock()

    def add(self, text: str) -> bool:
        """Add a warning. Return whether it is new."""
        place, bit = divmod(zlib.crc32(text.encode(errors="replace")) % (8 * self.BYTES), 8)
        locked = self._lock is not None and self._lock.acquire(timeout=self.LOCK_SECONDS)  # a child may die with it
        before = self._bits[place]
        self._bits[place] = before | 1 << bit
        if self._lock is not None and locked:
            self._lock.release()
        return not before >> bit & 1


class RankOutput(logging.Handler):
    """Print records and warnings of a rank, and append them to its log where our launcher does not.

    Args:
        rank: The rank.
        log: Its log.
        appends: Our launcher does not write the log.
        shows_warnings: Print warnings to standard error.
    """

    def __init__(self, rank: int, log: Path, *, appends: bool, shows_warnings: bool) -> None:
        super().__init__(logging.WARNING)
        self.form = RecordFormatter(rank)
        self.setFormatter(self.form)
        self._log, self._appends, self._shows_warnings = log, appends, shows_warnings
        self._process = os.getpid()
        self._seen = SeenWarnings()
        self._printed: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record."""
        self._write(self.format(record), shown=True)

    def warn(self, message: Warning | str, category: type[Warning], filename: str, line: int) -> None:
        """Print a warning, unless another process of this rank has: a loader worker, or their parent."""
        text = f"{filename}:{line}: {category.__name__}: {message}"
        new = text in self._printed or self._seen.add(text)  # the filter "always" repeats it in one process
        if new and len(self._printed) < MANY_WARNINGS:
            self._printed.add(text)
        self._write(self.form.join(time.time(), "WARNING", WARNINGS, text), shown=self._shows_warnings and new)

    def _write(self, text: str, *, shown: bool) -> None:
        if shown:
            with contextlib.suppress(OSError, ValueError):  # closed
                if os.getpid() == self._process:
                    print(end="")  # a live progress line makes way
                print(text, file=sys.stderr, flush=True)
        if self._appends or not shown:
            self.append(text)

    def append(self, text: str) -> None:
        """Append lines to the log."""
        with contextlib.suppress(OSError):
            make_folder(self._log.parent)
            with open(self._log, "a", encoding="utf-8", errors="backslashreplace", opener=open_like_folder) as file:
                file.write(text.rstrip("\n") + "\n")


class RankLogging:
    """The changes to logging and warnings in this process. `stop` restores what was there before.

    Args:
        output: Prints records and warnings.
    """

    def __init__(self, output: RankOutput) -> None:
        self.output = output
        self._last_resort, self._show_warning = logging.lastResort, warnings.showwarning
        self._formatted: list[tuple[logging.Handler, logging.Formatter | None]] = []

    def start(self) -> None:
        """Take over records that no handler takes, and warnings, unless the script has taken them over."""
        logging.lastResort = self.output
        if self._show_warning.__module__ == "warnings":
            warnings.showwarning = self._show
        self.format_libraries()

    def format_libraries(self) -> None:
        """Give the form of records to the handlers of libraries that print no time."""
        for handler in untimed_handlers():
            self._formatted.append((handler, handler.formatter))
            handler.setFormatter(self.output.form)

    def stop(self) -> None:
        """Restore logging and warnings."""
        if logging.lastResort is self.output:
            logging.lastResort = self._last_resort
        if warnings.showwarning == self._show:
            warnings.showwarning = self._show_warning
        for handler, form in self._formatted:
            handler.setFormatter(form)

    def _show(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if file is None:
            self.output.warn(message, category, filename, lineno)
        else:
            self._show_warning(message, category, filename, lineno, file, line)


def untimed_handlers() -> Iterator[logging.Handler]:
    """Yield handlers that an installed library has added to the logger of its own name, and that print no time."""
    streams: tuple[Any, ...] = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if not isinstance(logger, logging.Logger) or not logger.handlers or not _is_library(name):
            continue
        for handler in logger.handlers:
            if type(handler) is logging.StreamHandler and handler.stream in streams and not _prints_time(handler):
                yield handler


def _prints_time(handler: logging.Handler) -> bool:
    """Format a record, and return whether the result has a time (or an error, in a form that is not known)."""
    record = logging.LogRecord(WARNINGS, logging.WARNING, __file__, 1, "text", (), None)
    try:
        return re.search(r"\d\d:\d\d", handler.format(record)) is not None
    except Exception:
        return True


LIBRARIES = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))


def _is_library(logger: str) -> bool:
    """Return whether a logger has the name of an imported package of an installed library."""
    module = sys.modules.get(logger.partition(".")[0])
    return (getattr(module, "__file__", None) or "").startswith(LIBRARIES)


_current: RankLogging | None = None


def start(rank: int, log: Path, *, launched: bool) -> None:
    """Begin, or look for further libraries after the first call.

    Args:
        rank: The rank, or the number of a process that replaces another one.
        log: The log of the rank.
        launched: Our launcher has started this process, and writes the log.
    """
    global _current
    if _current is None:
        _current = RankLogging(RankOutput(rank, log, appends=not launched, shows_warnings=launched or rank == 0))
        _current.start()
    else:
        _current.format_libraries()


def stop() -> None:
    """Restore logging and warnings. Stopping twice changes nothing."""
    global _current
    current, _current = _current, None
    if current is not None:
        current.stop()


def record_failure(error: BaseException) -> None:
    """Append the traceback of an error that ends this process to its log, under another launcher than ours."""
    if _current is not None:
        record = failure_record.FailureRecord.of(error)
        text = f"{record.kind}\n{(record.traceback or record.message).rstrip()}"
        _current.output.append(_current.output.form.join(record.time, "CRITICAL", "unisono", text))
