"""Files at URLs: a read is repeated while its source cannot be reached; if that remains so, the error names it.

A source that disappears is no damage of the data: it ends the run, also with loader.on_error=skip, since samples that
are skipped on one process only would change the result.
"""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import fsspec  # type: ignore[import-untyped]

from unisono.errors import DataError

_log = logging.getLogger(__name__)

T = TypeVar("T")

WAITS = (1.0, 4.0, 10.0)
"""Seconds before each new attempt to read from a source that cannot be reached."""

TOO_MANY, SERVER_FAULT = 429, 500
"""HTTP statuses: too many requests, and the first one of those that blame the server."""

BUFFER = 1 << 18
"""Bytes that are read at least. fsspec itself reads a few MB ahead."""

VERSIONS = ("mtime", "ETag", "etag", "LastModified", "Last-Modified", "updated")
"""Keys under which file systems say which version of a file they have."""


class FileVersion(NamedTuple):
    """What a source says about a file.

    Attributes:
        size: in bytes; None: it does not say.
        version: a modification time or an ETag; "": it does not say.
    """

    size: int | None
    version: str


def is_remote(url: str) -> bool:
    """Return whether this is a URL of another machine's file."""
    return "://" in url and not url.startswith(("file://", "local://"))


def version_of(url: str) -> FileVersion:
    """Return the size and the version of a file. Raises OSError, ImportError or ValueError."""
    file_system, path = fsspec.core.url_to_fs(url)
    info = file_system.info(path)
    version = next((info[key] for key in VERSIONS if info.get(key)), "")
    return FileVersion(info.get("size"), str(version))


def open_remote(url: str) -> io.BufferedReader:
    """Open a file at a URL. Raises DataError if that fails."""
    return io.BufferedReader(RemoteFile(url), BUFFER)


def try_again(url: str, attempt: Callable[[], T]) -> T:
    """Return `attempt()`, which is called again after a while if it fails.

    Raises:
        DataError: all attempts failed, or there is no such file.
    """
    began = time.monotonic()
    for wait in (*WAITS, None):
        try:
            return attempt()
        except Exception as error:  # libraries of file systems raise errors of their own types
            if not _is_away(error):
                raise DataError(
                    f"Cannot open the shard {url}.",
                    f"{type(error).__name__}: {error}",
                    "check its address and your access.",
                ) from None
            shown = error.__cause__ or error  # fsspec's FileNotFoundError hides the reason
            if wait is None:
                raise DataError(
                    f"The shard {url} cannot be read any more.",
                    f"{len(WAITS) + 1} attempts in {time.monotonic() - began:.0f} s failed. The last one: "
                    f"{type(shown).__name__}: {shown}",
                    "check the network and the source, then continue the run with --resume.",
                ) from None
            _log.warning("Reading %s failed (%s: %s). Trying again in %g s.", url, type(shown).__name__, shown, wait)
            time.sleep(wait)
    raise AssertionError


def _is_away(error: Exception) -> bool:
    """Return whether a source may come back: it has not answered, or has a fault. It has not denied that a file exists.

    fsspec raises FileNotFoundError in both cases, from the error of its HTTP library.
    """
    if not isinstance(error, (FileNotFoundError, PermissionError, ImportError, ValueError)):
        return True
    cause = error.__cause__
    status = getattr(cause, "status", None)
    if isinstance(status, int):
        return status == TOO_MANY or status >= SERVER_FAULT
    return isinstance(cause, (ConnectionError, TimeoutError)) or type(cause).__module__.startswith("aiohttp")


class RemoteFile(io.RawIOBase):
    """A file at a URL, opened again after an error."""

    def __init__(self, url: str) -> None:
        self.url, self._position = url, 0
        self._file: Any = try_again(url, self._opened)

    def _opened(self) -> Any:
        file_system, path = fsspec.core.url_to_fs(self.url)
        return file_system.open(path, "rb")

    def _again(self, operation: Callable[[Any], T]) -> T:
        """Return `operation(file)` with the file at its position."""

        def attempt() -> T:
            if self._file is None:
                self._file = self._opened()
                self._file.seek(self._position)
            try:
                return operation(self._file)
            except Exception:
                self._file = None
                raise

        return try_again(self.url, attempt)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._again(lambda file: file.read(len(buffer)))
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = self._again(lambda file: file.seek(offset, whence))
        return self._position

    def tell(self) -> int:
        return self._position

    def close(self) -> None:
        if not self.closed and self._file is not None:
            self._file.close()
        super().close()
