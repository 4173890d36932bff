"""Files as shards: expand patterns, open files, and keep an index of where the samples of a file begin."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from io import UnsupportedOperation
from pathlib import Path
from typing import IO, Any, TypeVar

import fsspec  # type: ignore[import-untyped]
from braceexpand import braceexpand
from fsspec.compression import compr  # type: ignore[import-untyped]
from fsspec.utils import infer_compression  # type: ignore[import-untyped]

from unisono import environment
from unisono.data.streaming.local_file import open_local
from unisono.data.streaming.remote_file import is_remote, open_remote, try_again, version_of
from unisono.data.streaming.sample_offsets import LineOffsets, TarOffsets
from unisono.data.streaming.shard_cache import RemoteShard, ShardCache
from unisono.errors import DataError, Problem
from unisono.json_forms import parse_value

SCHEMES = ("s3", "s3a", "gs", "gcs", "abfs", "az", "hf", "http", "https", "file", "local", "memory")
"""Schemes of URLs of shards. fsspec knows more, and some of them run programs, or join several URLs to one."""

MOST_SAMPLE = 1 << 31
"""Largest size in bytes of one file in a compressed tar, and of one line of a compressed file. A compressed file of
1 MB may hold 1 GB of zeros."""

MOST_PREAD = 1 << 30
"""Largest size in bytes of one read at a position. Linux returns at most 2 GiB at once."""

MOST_PROBLEMS = 5
"""Shards that an error names, if more of them do not fit their index."""

INDEX_VERSION = 2
"""Version of the cached indexes; part of their file names."""


Offsets = TypeVar("Offsets", TarOffsets, LineOffsets)

Urls = str | Path | Sequence[str | Path]
"""Paths or URLs, or patterns of them."""


class DamagedSample(Exception):
    """A sample cannot be read, or a shard cannot be read any further.

    Args:
        offset: number of samples before the damage.
        why: a sentence that names the byte.
    """

    def __init__(self, offset: int, why: str) -> None:
        super().__init__(offset, why)
        self.offset, self.why = offset, why


def expand(urls: Urls) -> list[str]:
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


@dataclass(frozen=True)
class ShardFile:
    """A file that is a shard.

    Attributes:
        url: its path or URL.
        cache: where remote shards are kept; None: they are not.
        size: in bytes, as its index says; None: unknown.
        sha256: as its index says; "": unknown.
        offsets: URL of a file that says where its samples begin; "": there is none.
        samples: their number, as its index says; None: unknown.
    """

    url: str
    cache: ShardCache | None = None
    size: int | None = None
    sha256: str = ""
    offsets: str = ""
    samples: int | None = None

    def open(self) -> IO[bytes]:
        """Open the file for reading, from the cache if there is one, and decompress it while it is read.

        Raises:
            DataError: the file cannot be opened.
        """
        refuse_scheme(self.url)
        file = self._open_remote() if is_remote(self.url) else self._open_local()
        kind = compression(self.url)
        opened: IO[bytes] = compr[kind](file, mode="rb") if kind else file
        return opened

    def check(self) -> None:
        """Compare the size of a local file with its index. Reads nothing; a file at a URL is compared when it is read.

        Raises:
            DataError: there is no such file, or it has another size.
        """
        if not is_remote(self.url):
            self._local_path()

    def _local_path(self) -> str:
        path: str = fsspec.core.url_to_fs(self.url)[1]
        try:
            found = os.stat(path)
            if not stat.S_ISREG(found.st_mode):
                raise ValueError("it is no regular file")  # a FIFO would wait, and a device has no end
        except (OSError, ValueError) as error:
            raise self._cannot_open(error) from None
        if self.size is not None and found.st_size != self.size:
            cut = found.st_size < self.size
            raise DataError(
                f"The shard {self.url} is cut short." if cut else f"The shard {self.url} is another one.",
                f"It has {found.st_size:,} bytes, and {self.size:,} in its index.",
                "copy it again; or repeat the command that wrote it, unisono shards FOLDER OUT: it writes this shard.",
            )
        return path

    def _open_local(self) -> IO[bytes]:
        path = self._local_path()
        try:
            return open_local(path)
        except OSError as error:
            raise self._cannot_open(error) from None

    def _cannot_open(self, error: Exception) -> DataError:
        facts = f"{type(error).__name__}: {error}"
        return DataError(f"Cannot open the shard {self.url}.", facts, "check the path and its permissions.")

    def _open_remote(self) -> IO[bytes]:
        if self.cache is not None:
            size, version = (self.size, "") if self.sha256 else try_again(self.url, partial(version_of, self.url))
            shard = RemoteShard(self.url, size, version, self.sha256)
            if (cached := self.cache.open(shard, partial(open_remote, self.url))) is not None:
                return cached
        return open_remote(self.url)

    def index(self, scan: Callable[[], Offsets], kind: type[Offsets]) -> Offsets:
        """Return where the samples are: from the file beside the shard, from the cache, or else from `scan()`.

        Args:
            scan: scans the shard.
            kind: TarOffsets or LineOffsets.

        Raises:
            DataError: the file beside the shard is broken.
        """
        if not self.offsets:
            return cached_index(self.url, scan, kind)
        with ShardFile(self.offsets, self.cache).open() as file:
            text = file.read()
        try:
            found = kind.from_json(parse_value(text))
            if self.samples is not None and len(found) != self.samples:
                raise ValueError(f"it has {len(found):,} samples, and {self.samples:,} in index.json")
        except ValueError as error:
            raise DataError(
                f"The index {self.offsets} of a shard is broken.",
                f"{error}",
                "write the shards again: unisono shards FOLDER OUT --force",
            ) from None
        return found


def check_all(files: Sequence[ShardFile]) -> None:
    """Compare the sizes of local files with their index.

    Raises:
        DataError: some are missing or have another size: the message names up to MOST_PROBLEMS of them.
    """
    problems = list[Problem]()
    for file in files:
        try:
            file.check()
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError.of(problems[:MOST_PROBLEMS])


def read_at(file: IO[bytes], begin: int, size: int) -> bytes:
    """Return `size` bytes of a file from the byte `begin` on; fewer at its end."""
    if size <= MOST_PREAD:
        try:
            return os.pread(file.fileno(), size, begin)
        except UnsupportedOperation:  # a file at a URL
            pass
    file.seek(begin)
    return file.read(size)


def cached_index(url: str, scan: Callable[[], Offsets], kind: type[Offsets]) -> Offsets:
    """Return `scan()`, or its cached result if the file has not changed since.

    The cache is in the user's cache folder. A cache that cannot be written is not an error: it only costs time.
    """
    path = _index_path(url)
    if path is not None:
        with suppress(OSError, ValueError):
            return kind.from_json(json.loads(path.read_bytes()))
    index = scan()
    if path is not None:
        draft = path.with_suffix(f".{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps(index.as_json()), encoding="utf-8")
            draft.replace(path)
        except OSError:  # a full disk, say
            with suppress(OSError):
                draft.unlink()
    return index


def _index_path(url: str) -> Path | None:
    """Return the path of a file's cached index; None if the file system reports no modification time or ETag."""
    try:
        size, version = version_of(url)
    except Exception:  # a source that is away, with an error of its own type; reading the file will tell
        return None
    if not version:
        return None
    where = os.path.abspath(url) if "://" not in url else url
    name = hashlib.sha256(repr((INDEX_VERSION, where, size, version)).encode()).hexdigest()
    return environment.cache() / "shards" / f"{name[:40]}.json"
