"""Which users may read the files of a run, as modes of Unix.

    secure.share   folders   files
    owner          0700      0600
    group          0750      0640
    all            as the umask of the process says

`share_with` sets these modes on a run directory at its start and at its end. In between every new file takes the modes
of its folder: in a folder that other users cannot enter, `open_like_folder` and `make_folder` create nothing that they
could read. Elsewhere the umask decides, as always.

The mode of the folder decides: the kernel asks for the permission to search each folder of a path (path_resolution(7)).
The modes of files matter once they are moved or copied.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

Share = Literal["owner", "group", "all"]

OTHERS = 0o007
CLOSED = 0o700
"""The mode of a new run directory, until the settings are known."""


def open_like_folder(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file as `os.open` does, and return its descriptor. A new file takes the modes of its folder.

    It is also an opener for `open`.
    """
    if not flags & os.O_CREAT:
        return os.open(path, flags)
    mode = _mode_inside(os.path.dirname(os.fspath(path)) or ".")
    file = os.open(path, flags, 0o666 if mode is None else 0o600)
    if mode is not None:
        with suppress(OSError):  # of another user, or on a file system without modes
            os.fchmod(file, mode & 0o666)
    return file


def write_text(path: Path, text: str, *, errors: str = "strict") -> None:
    """Write a text file, which takes the modes of its folder."""
    with open(path, "w", encoding="utf-8", errors=errors, opener=open_like_folder) as file:
        file.write(text)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file, which takes the modes of its folder."""
    with open(path, "wb", opener=open_like_folder) as file:
        file.write(content)


def make_like_folder(path: Path) -> None:
    """Set the mode of a file that a library has created to that of its folder."""
    mode = _mode_inside(path.parent)
    if mode is not None:
        with suppress(OSError):
            path.chmod(mode & 0o666)


def make_folder(path: Path) -> None:
    """Create a folder and its parents, where they are missing. Each takes the modes of its parent."""
    if path.is_dir():
        return
    if path.parent != path:
        make_folder(path.parent)
    mode = _mode_inside(path.parent)
    with suppress(FileExistsError):  # another process was faster
        path.mkdir(mode=0o777 if mode is None else mode)
        return
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))


def make_closed(path: Path) -> None:
    """Create a folder that only its owner can enter, and its parents as the umask says. Keep one that exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(mode=CLOSED)


def _mode_inside(folder: str | os.PathLike[str]) -> int | None:
    """Return the mode of what is created in a folder; None: the umask decides."""
    mode = stat.S_IMODE(os.stat(folder).st_mode)
    return None if mode & OTHERS else 0o700 | (mode & 0o050)


def share_with(share: Share, folder: Path, is_ours: Callable[[str], bool]) -> str:
    """Set the modes of a folder and of everything in it. Return why other users can still enter it; "" if they cannot.

    A folder that already has files of others (a project that was given as run directory) keeps its own mode, and so do
    those files.

    Args:
        share: The users that may read.
        folder: A run directory, or a folder of checkpoints.
        is_ours: Return whether an entry of the folder belongs to runs, by its name.
    """
    closed = not stat.S_IMODE(folder.stat().st_mode) & OTHERS
    strange = [] if closed else [name for name in os.listdir(folder) if not is_ours(name)]
    allowed = _allowed(share)
    if not strange:
        _change(folder, allowed)
    for name in os.listdir(folder):
        if name not in strange:
            _change_all(folder / name, allowed)
    if share == "all" or not stat.S_IMODE(folder.stat().st_mode) & OTHERS:
        return ""
    if strange:
        return f"it has other files, such as {min(strange)}"
    if folder.stat().st_uid != os.geteuid():
        return "it belongs to another user"
    return "its file system keeps no modes"


def _allowed(share: Share) -> int:
    """Return the permissions of folders; those of files are the same without the right to execute."""
    return 0o777 & ~umask() if share == "all" else {"owner": 0o700, "group": 0o750}[share]


def _change_all(path: Path, allowed: int) -> None:
    """Set the modes of an entry and of everything below it. Links are not followed."""
    if path.is_symlink():
        return
    _change(path, allowed)
    if path.is_dir():
        with suppress(OSError):
            for inner in os.scandir(path):
                _change_all(Path(inner.path), allowed)


def _change(path: Path, allowed: int) -> None:
    """Set the mode of a folder, a file or a socket. A file stays executable for those that may read it."""
    with suppress(OSError):  # it is gone, or of another user
        before = stat.S_IMODE(os.lstat(path).st_mode)
        executable = path.is_dir() or before & 0o100
        mode = allowed if executable else allowed & 0o666
        if before & 0o777 != mode:
            os.chmod(path, mode | before & 0o7000)


def umask() -> int:
    """Return the umask of this process."""
    with suppress(OSError, IndexError):
        text = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        return int(text.partition("\nUmask:")[2].split()[0], 8)
    now = os.umask(0o077)  # other threads create private files for a moment
    os.umask(now)
    return now
