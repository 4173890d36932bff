"""An opened local file, by its descriptor. Python's own files warn when they are not closed. Streams have no end."""

from __future__ import annotations

import io
import os
from typing import Any


class LocalFile(io.RawIOBase):
    """A file that is read. It is closed with the object, and owns the descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def readinto(self, buffer: Any) -> int:
        return os.readv(self._descriptor, [buffer])

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return os.lseek(self._descriptor, offset, whence)

    def tell(self) -> int:
        return os.lseek(self._descriptor, 0, io.SEEK_CUR)

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._descriptor)


def open_local(path: str) -> io.BufferedReader:
    """Open a file for reading. Raises OSError."""
    return reader_of(os.open(path, os.O_RDONLY | os.O_CLOEXEC))


def reader_of(descriptor: int) -> io.BufferedReader:
    """Return a reader that owns this descriptor."""
    return io.BufferedReader(LocalFile(descriptor))
