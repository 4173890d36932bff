"""The log of a rank: everything the process printed, except lines that were overwritten on the terminal.

rank-N.log has the lines as they were printed, so that programs can read them, and rank-N.times the times at which they
arrived. A line of that file is a mark:

    0 1760000000.123               the lines from byte 0 of the log on arrived at this time, in seconds since 1970
    4242 1760000003.501 died -9    the process ended here

The words are `ended`; `failed`: with an error, whose traceback follows; `died`: of a signal, or without an error
message; `stopped`: by the launcher. The number is the exit status, negative for a signal.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path
from typing import NamedTuple

from unisono.security.file_modes import make_folder, open_like_folder

LONGEST_LINE = 1 << 20
"""Length in bytes. A longer line is written in pieces, so that memory stays bounded."""

_END = re.compile(rb"\r\n|\n|\r(?=.)", re.DOTALL)
"""The end of a piece. A carriage return needs the next byte: \\r\\n ends an ordinary line."""


_COLOR = re.compile(rb"\x1b\[[0-9;]*m")


class RankLog:
    """Append to a log file, and its marks. A piece that ends in a carriage return is a live line and is left out.

    A full disk ends the log, not the run: `error` is then the reason, and further output is dropped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        make_folder(path.parent)
        self._file = open(path, "ab", buffering=0, opener=open_like_folder)  # noqa: SIM115  (closed in close)
        self._times = open(times_path(path), "ab", buffering=0, opener=open_like_folder)  # noqa: SIM115
        self._open_line = b""
        self.error: OSError | None = None

    def write(self, data: bytes) -> None:
        """Append output of the process, which may be cut anywhere."""
        data = self._open_line + data
        kept, begin = [], 0
        for end in _END.finditer(data):
            if end.group() != b"\r":
                kept.append(data[begin : end.end()])
            begin = end.end()
        self._open_line = data[begin:]
        if len(self._open_line) > LONGEST_LINE:
            kept.append(self._open_line)
            self._open_line = b""
        if kept:
            self._append(b"".join(kept))

    def close(self, ending: str = "") -> None:
        """Write the last line if it is unfinished, and close the file. `ending`: word and status of the last mark."""
        if self._open_line and not self._open_line.endswith(b"\r"):
            self._append(self._open_line + b"\n")
        self._open_line = b""
        if ending:
            self._mark(time.time(), ending)
        self._file.close()
        self._times.close()

    def _append(self, data: bytes) -> None:
        if self.error is None:
            self._mark(time.time())
            try:
                self._file.write(_COLOR.sub(b"", data))
            except OSError as error:
                self.error = error

    def _mark(self, now: float, ending: str = "") -> None:
        """Write a mark at the present end of the log, before the lines that it is for."""
        with contextlib.suppress(OSError):  # the disk is full, which the log reports
            self._times.write(mark(os.fstat(self._file.fileno()).st_size, now, ending))


class LogMark(NamedTuple):
    """A line of rank-N.times.

    Attributes:
        place: The byte of the log at which it applies.
        time: Seconds since 1970.
        word: How the process ended; "": it did not.
        status: Its exit status.
    """

    place: int
    time: float
    word: str = ""
    status: int = 0

    def __str__(self) -> str:
        """Return what is said about the end of the process."""
        if self.status < 0:
            return f"died of signal {-self.status} ({_signal_name(-self.status)})"
        return f"exited with status {self.status} and no error message"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return "unknown"


def times_path(log: Path) -> Path:
    """Return the path of a log's marks."""
    return log.with_suffix(".times")


def mark(place: int, now: float, ending: str = "") -> bytes:
    """Return the line of a mark."""
    return f"{place} {now:.3f} {ending}".rstrip().encode() + b"\n"


def read_mark(line: bytes) -> LogMark | None:
    """Return the mark that a line has, or None if it is damaged."""
    place, _, rest = line.decode("ascii", errors="replace").partition(" ")
    time_, word, status = (*rest.split(), "", "", "")[:3]
    try:
        return LogMark(int(place), float(time_), word, int(status or 0))
    except ValueError:
        return None


def append_failure(log: Path, text: str, when: float) -> None:
    """Append the traceback of a process that has ended to its log."""
    with (
        contextlib.suppress(OSError),
        open(log, "a", encoding="utf-8", errors="backslashreplace", opener=open_like_folder) as file,
        open(times_path(log), "ab", opener=open_like_folder) as times,
    ):
        times.write(mark(os.fstat(file.fileno()).st_size, when))
        times.flush()
        file.write(text.rstrip("\n") + "\n")


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last lines of a log that are not blank, or [] if there is no log."""
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 64 * 1024))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-count:]
