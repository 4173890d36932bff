"""One rank's log: everything the process wrote, except the lines that were meant to be overwritten."""

from __future__ import annotations

import re
from pathlib import Path

LONGEST_LINE = 1 << 20
"""Bytes; a line without an end is written in pieces, so that memory stays bounded."""

_END = re.compile(rb"\r\n|\n|\r(?=.)", re.DOTALL)
"""Where a piece ends. A carriage return decides nothing until the next byte is there: \\r\\n ends an ordinary line."""


_COLOR = re.compile(rb"\x1b\[[0-9;]*m")


class RankLog:
    """Appends to a file. A piece that ends in a carriage return is a live line, and is left out.

    A disk that is full ends the log and not the run: `lost` then says why, and the rest is dropped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  (closed in close)
        self._open_line = b""
        self.lost: OSError | None = None

    def write(self, data: bytes) -> None:
        """Take what the process wrote, cut anywhere."""
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

    def close(self) -> None:
        """Write the last line, if it had no end, and close."""
        if self._open_line and not self._open_line.endswith(b"\r"):
            self._append(self._open_line + b"\n")
        self._open_line = b""
        self._file.close()

    def _append(self, data: bytes) -> None:
        if self.lost is None:
            try:
                self._file.write(_COLOR.sub(b"", data))
            except OSError as error:
                self.lost = error


def last_lines(path: Path, count: int) -> list[str]:
    """The last lines of a log that say something; [] without one."""
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 64 * 1024))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-count:]
