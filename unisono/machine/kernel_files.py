"""Read the small files in which Linux reports its state, below /proc and /sys.

A file that is missing or may not be read is empty text, because every kernel, container and machine has others. Files
that are read again and again stay open, which halves the time of a read.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

READ_BYTES = 1 << 14
SHORT_BYTES = 1 << 11
"""The kernel returns at least a page, but for a line that does not fit: a shorter part is the last one."""


class KernelFiles:
    """Read files of Linux.

    Args:
        root: The folder that has proc/ and sys/.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root
        self._open: dict[str, int] = {}

    def path(self, name: str) -> Path:
        """Return the path of a file such as proc/stat."""
        return self.root / name

    def text(self, name: str, *, keep: bool = True) -> str:
        """Return the content of a file; "" if it cannot be read. With `keep`, it stays open for the next read."""
        try:
            if name not in self._open:
                self._open[name] = os.open(self.path(name), os.O_RDONLY | os.O_CLOEXEC)
            file, data = self._open[name], b""
            while part := os.pread(file, READ_BYTES, len(data)):
                data += part
                if len(part) < SHORT_BYTES:
                    break
        except OSError:  # of a process that has ended, too
            self.forget(name)
            return ""
        if not keep:
            self.forget(name)
        return data.decode(errors="replace")

    def number(self, name: str, *, keep: bool = True) -> float | None:
        """Return the only number of a file, or None."""
        try:
            return float(self.text(name, keep=keep))
        except ValueError:
            return None

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted; [] if there is none."""
        try:
            return sorted(os.listdir(self.path(folder)))
        except OSError:
            return []

    def forget(self, start: str = "") -> None:
        """Close the open files whose names begin with `start`."""
        for name in [name for name in self._open if name.startswith(start)]:
            with contextlib.suppress(OSError):
                os.close(self._open.pop(name))


def pairs_of(text: str) -> dict[str, int]:
    """Return the numbers of lines like "MemFree:  123 kB" or "nr_throttled 7", by the first word without its colon."""
    found = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ") if "\t" not in line else line.partition("\t")
        words = value.split()
        if words and words[0].isdecimal():
            found[name.rstrip(":")] = int(words[0])
    return found
