"""The log of a rank: everything the process printed, except lines that were overwritten on the terminal."""

from __future__ import annotations

import re
from pathlib import Path

LONGEST_LINE = 1 << 20
"""Length in bytes. A longer line is written in pieces, so that memory stays bounded."""

_END = re.compile(rb"\r\n|\n|\r(?=.)", re.DOTALL)
"""The end of a piece. A carriage return needs the next byte: \\r\\n ends an ordinary line."""


_COLOR = re.compile(rb"\x1b\[[0-9;]*m")


class RankLog:
    """Append to a log file. A piece that ends in a carriage return is a live line and is left out.

    A full disk ends the log, not the run: `error` is then the reason, and further output is dropped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  (closed in close)
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

    def close(self) -> None:
        """Write the last line if it is unfinished, and close the file."""
        if self._open_line and not self._open_line.endswith(b"\r"):
            self._append(self._open_line + b"\n")
        self._open_line = b""
        self._file.close()

    def _append(self, data: bytes) -> None:
        if self.error is None:
            try:
                self._file.write(_COLOR.sub(b"", data))
            except OSError as error:
                self.error = error


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
