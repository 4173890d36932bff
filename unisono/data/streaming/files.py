"""Files as shards: expand patterns, open files, and cache an index of where the samples of a file begin."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import fsspec  # type: ignore[import-untyped]
from braceexpand import braceexpand
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from fsspec.utils import infer_compression  # type: ignore[import-untyped]

from unisono import environment
from unisono.errors import DataError

SCHEMES = ("s3", "s3a", "gs", "gcs", "abfs", "az", "hf", "http", "https", "file", "local", "memory")
"""Schemes of URLs of shards. fsspec knows more, and some of them run programs, or join several URLs to one."""

MOST_SAMPLE = 1 << 31
"""Largest size in bytes of one file in a compressed tar, and of one line of a compressed file. A compressed file of
1 MB may hold 1 GB of zeros."""

INDEX_VERSION = 1
"""Version of the cached indexes; part of their file names."""


class DamagedSample(Exception):
    """A sample cannot be read, or a shard cannot be read any further.

    Args:
        offset: number of samples before the damage.
        why: a sentence that names the byte.
    """

    def __init__(self, offset: int, why: str) -> None:
        super().__init__(offset, why)
        self.offset, self.why = offset, why


def expand(urls: str | Path | Sequence[str | Path]) -> list[str]:
    """Return the files that the patterns match, sorted within each pattern.

    `{000..099}` and `{train,more}` expand as in bash; `*` and `?` match existing files. Unbalanced braces are taken
    literally.

    Raises:
        DataError: a pattern matches no file.
    """
    found: list[str] = []
    for url in [urls] if isinstance(urls, (str, Path)) else urls:
        matches: list[str] = []
        for pattern in _expand_braces(str(url)):
            refuse_scheme(pattern)
            file_system, path = fsspec.core.url_to_fs(pattern)
            if glob.has_magic(path):
                paths = file_system.glob(path)
                matches += sorted(map(file_system.unstrip_protocol, paths) if "://" in pattern else paths)
            else:
                matches.append(pattern)
        if not matches:
            raise DataError(f"No file matches {url}.", "A stream needs at least one shard.", "check the pattern.")
        found += matches
    return found


def refuse_scheme(url: str) -> None:
    """Raise DataError for a URL whose scheme is not one of SCHEMES."""
    scheme, found, _ = url.partition("://")
    if (found and scheme not in SCHEMES) or "::" in url:
        names = ", ".join(f"{name}://" for name in SCHEMES)
        raise DataError(
            f"Cannot read {url!a}.", f"Shards are files, or URLs that begin with {names}.", "copy the file."
        )


def decode_json(text: bytes) -> Any:
    """Return a JSON value. Raises ValueError if it is none, or is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _expand_braces(url: str) -> list[str]:
    try:
        return list(braceexpand(url, escape=False))
    except ValueError:  # unbalanced braces
        return [url]


def compression(url: str) -> str | None:
    """Return the compression that the file name implies; None if there is none, so that reading can start anywhere."""
    return "gzip" if url.endswith(".tgz") else infer_compression(url)  # fsspec does not know .tgz


def open_file(url: str) -> IO[bytes]:
    """Open a file for reading, and decompress it while it is read.

    Raises:
        DataError: the file cannot be opened.
    """
    refuse_scheme(url)
    try:
        system, path = fsspec.core.url_to_fs(url)
        if isinstance(system, LocalFileSystem) and not stat.S_ISREG(os.stat(path).st_mode):
            raise ValueError("it is no regular file")  # a FIFO would wait, and a device has no end
        file: IO[bytes] = fsspec.open(url, "rb", compression=compression(url)).open()
    except (OSError, ImportError, ValueError) as error:
        raise DataError(
            f"Cannot open the shard {url}.", f"{type(error).__name__}: {error}", "check the path and its permissions."
        ) from None
    return file


def cached_index(url: str, build: Callable[[], Any]) -> Any:
    """Return `build()`, a JSON value that describes a file, or the cached value if the file has not changed since.

    The cache is in the user's cache folder. A cache that cannot be written is not an error: it only costs time.
    """
    path = _index_path(url)
    if path is not None:
        with suppress(OSError, ValueError):
            return json.loads(path.read_bytes())
    index = build()
    if path is not None:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps(index), encoding="utf-8")
            partial.replace(path)
    return index


def _index_path(url: str) -> Path | None:
    """Return the path of a file's cached index; None if the file system reports no modification time or ETag."""
    try:
        file_system, path = fsspec.core.url_to_fs(url)
        info = file_system.info(path)
    except (OSError, ImportError, ValueError):
        return None
    version = next((info[key] for key in ("mtime", "ETag", "etag", "LastModified", "updated") if info.get(key)), None)
    if version is None:
        return None
    where = os.path.abspath(path) if "://" not in url else url
    name = hashlib.sha256(repr((INDEX_VERSION, where, info.get("size"), str(version))).encode()).hexdigest()
    return environment.cache() / "shards" / f"{name[:40]}.json"
