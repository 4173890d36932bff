"""Read the small files of a checkpoint, and open the large ones: regular files only.

A link could name a file of the reader's, a device has no end, and a FIFO waits for a writer. None of them is opened.
"""

from __future__ import annotations

import os
import stat
from io import BufferedReader
from pathlib import Path

KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
}


def kind_of(path: Path) -> str:
    """Return what a path is if it is no regular file: "a link", "a folder", ...; "" if it is one.

    Raises:
        OSError: There is nothing.
    """
    return _kind(os.lstat(path).st_mode)


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading.

    Raises:
        OSError: There is none, or it cannot be opened.
        ValueError: It is a link, a folder, a device, a FIFO or a socket.
    """
    _refuse(path, kind_of(path))  # before it is opened: opening some devices does something
    file = open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb")  # noqa: SIM115
    if kind := _kind(os.fstat(file.fileno()).st_mode):  # replaced in between
        file.close()
        _refuse(path, kind)
    return file


def read_regular(path: Path, most: int) -> bytes:
    """Return the content of a regular file.

    Args:
        path: The file.
        most: The largest size in bytes. Memory is allocated for the size that the file has.

    Raises:
        OSError: As for `open_regular`.
        ValueError: As for `open_regular`, or the file is larger.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ValueError(f"it has {size:,} bytes, and at most {most:,} are read")
        return file.read(size)


def _kind(mode: int) -> str:
    return "" if stat.S_ISREG(mode) else KINDS.get(stat.S_IFMT(mode), "no regular file")


def _refuse(path: Path, kind: str) -> None:
    if kind:
        raise ValueError(f"{path.name} is {kind}; the files of a checkpoint are regular files")
