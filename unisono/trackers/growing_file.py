"""Read a file that another process appends to, and notice the end of that process."""

from __future__ import annotations

import os
import select
import sys
from pathlib import Path

CHUNK_BYTES = 1 << 20
"""Bytes that are read at once, so that a long file does not have to fit in memory."""


class GrowingFile:
    """The lines of a file, each returned once it is complete. The file need not exist yet.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._place = 0
        self._rest = b""

    def lines(self) -> list[bytes]:
        """Return the next complete lines, without their ends; [] if there are none at present."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._place)
                while data := file.read(CHUNK_BYTES):
                    self._place += len(data)
                    *lines, self._rest = (self._rest + data).split(b"\n")
                    if lines:
                        return lines
        except FileNotFoundError:
            pass
        return []

    @property
    def rest(self) -> bytes:
        """The line at the end that is not complete."""
        return self._rest


def input_ended(seconds: float) -> bool:
    """Wait until standard input ends, at most for `seconds`. Return whether it has ended."""
    return bool(select.select([sys.stdin], [], [], seconds)[0]) and not os.read(0, 1)
