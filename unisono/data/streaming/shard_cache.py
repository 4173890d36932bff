"""A cache of remote shards on a local disk, with a limit, for all processes of a host.

    FOLDER/KEY.shard     a whole shard, whose checksum was right; its access time says when it was used last
    FOLDER/KEY.json      its URL, size, checksum, modification time, and the boot in which the checksum was compared
    FOLDER/KEY.partial   a shard that is being downloaded; it has its final size from the beginning

KEY is a hash of the URL, the size and the version of the shard, so that a new version is another file. A file becomes a
shard by a rename, after its content is on the disk. Locks (flock) end with the process that holds them, so nothing is
left behind by a kill but a partial file, which the next process removes:

    FOLDER/lock   exclusive   while room is made for a shard
    KEY.partial   exclusive   while it is downloaded; the other processes wait for a shared lock, and then use it
    KEY.shard     shared      while it is read; only shards that no process reads are removed
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from unisono.config.wording import size as in_words
from unisono.costs.device_table import bytes_in
from unisono.data.streaming.local_file import open_local, reader_of
from unisono.errors import DataError
from unisono.json_forms import parse

_log = logging.getLogger(__name__)

BLOCK = 1 << 20
"""Bytes of one read of a download."""

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_not_cached: dict[str, int] = {}
"""For each folder, how often this process could not cache a shard there."""

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class RemoteShard(NamedTuple):
    """A shard to cache.

    Attributes:
        url: its address.
        size: in bytes; None: unknown.
        version: of the content; "": unknown.
        sha256: of the content; "": unknown.
    """

    url: str
    size: int | None
    version: str = ""
    sha256: str = ""


@dataclass(frozen=True)
class ShardCache:
    """Keep remote shards of a stream on a local disk, for all processes of the host: Stream.tar(..., cache=...).

    The shards that were not used for the longest time are removed, so that all together stay below the limit. If the
    disk is full before that, or all shards in the cache are being read, a warning says so, and a shard is read from its
    URL. The result of a run never depends on the cache.

    Args:
        folder: on a local disk. Several runs may share it.
        limit: bytes, or a text such as "200GB". It must hold the shards that are read at the same time: for each
            process and each loader worker those of a window, and at most 8.
    """

    folder: str | Path
    limit: int | str

    def __post_init__(self) -> None:
        if self.limit_bytes < 1:
            raise DataError(f"The limit of a cache cannot be {self.limit}.", "It is a size.", 'limit="200GB"')
        try:
            Path(self.folder).mkdir(parents=True, exist_ok=True)
            with self._locked():
                pass
        except OSError as error:
            raise DataError(
                f"Cannot cache shards in {self.folder}.", f"{error.strerror}.", "give a folder that you may write."
            ) from None

    @property
    def limit_bytes(self) -> int:
        """Return the limit in bytes."""
        return self.limit if isinstance(self.limit, int) else bytes_in(self.limit)

    def open(self, shard: RemoteShard, source: Callable[[], IO[bytes]]) -> IO[bytes] | None:
        """Return the cached file of a shard, which is downloaded first if needed; None: read it from its URL.

        Raises:
            DataError: the limit is smaller than the shard, its content is not what its index says, or its source
                cannot be reached.
        """
        if shard.size is not None and shard.size > self.limit_bytes:
            raise DataError(
                f"The cache in {self.folder} cannot hold the shard {shard.url}.",
                f"The shard has {in_words(shard.size)}, and the limit of the cache is {in_words(self.limit_bytes)}.",
                f'limit="{in_words(4 * shard.size).replace(" ", "")}", or more.',
            )
        try:
            return self._open(shard, source)
        except OSError as error:
            free, do = "", "Make room there, or cache in another folder."
            with suppress(OSError):
                free = f" ({in_words(shutil.disk_usage(self.folder).free)} free)"
            self._warn(f"{error.strerror}{free}", do, shard.url)
            return None

    def _warn(self, why: str, do: str, url: str) -> None:
        """Warn that a shard is not cached, and say what to do: the 1st, 2nd, 4th, 8th time in this process."""
        times = _not_cached[str(self.folder)] = _not_cached.get(str(self.folder), 0) + 1
        if times & (times - 1) == 0:
            count = f" ({times} times in this process)" if times > 1 else ""
            words = "Cannot cache %s in %s: %s. It is read from its source%s. %s"
            _log.warning(words, url, self.folder, why, count, do)

    def _open(self, shard: RemoteShard, source: Callable[[], IO[bytes]]) -> IO[bytes] | None:
        key = hashlib.sha256(repr((shard.url, shard.size, shard.version, shard.sha256)).encode()).hexdigest()[:32]
        whole, partial = (Path(self.folder) / f"{key}.{end}" for end in ("shard", "partial"))
        while True:
            if (file := self._usable(whole)) is not None:
                return file
            download = os.fdopen(os.open(partial, os.O_RDWR | os.O_CREAT, 0o644), "r+b")
            try:
                fcntl.flock(download, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(download, partial):
                    break
            except BlockingIOError:
                fcntl.flock(download, fcntl.LOCK_SH)  # until it is a shard, which others may read, or its writer died
            download.close()
        try:
            done = self._fill(download, shard, source)
            if done is None:
                why = f"its limit is {in_words(self.limit_bytes)}, and all shards in it are in use"
                self._warn(why, "Raise the limit, or use fewer processes and workers.", shard.url)
                partial.unlink()
                download.close()
                return None
            _write_json(whole.with_suffix(".json"), done)
            partial.rename(whole)
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            download.close()
            raise
        fcntl.flock(download, fcntl.LOCK_SH)
        download.seek(0)
        reader = reader_of(os.dup(download.fileno()))  # the lock belongs to both
        download.close()
        return reader

    def _fill(self, file: IO[bytes], shard: RemoteShard, source: Callable[[], IO[bytes]]) -> dict[str, Any] | None:
        """Download a shard into its partial file, and return its description; None: there is no room for it."""
        file.truncate(0)
        try:
            room = self._reserve(file, shard.size or 0)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            with self._locked():
                self._remove_oldest(self._total() - (shard.size or 0))
            room = self._reserve(file, shard.size or 0)
        if not room:
            return None
        digest, written = hashlib.sha256(), 0
        with source() as remote:
            while content := remote.read(BLOCK):
                digest.update(content)
                written += file.write(content)
        file.truncate(written)
        file.flush()
        os.fsync(file.fileno())
        _compare(shard, written, digest.hexdigest())
        stat = os.fstat(file.fileno())
        return {
            "url": shard.url,
            "size": written,
            "sha256": digest.hexdigest(),
            "mtime_ns": stat.st_mtime_ns,
            "boot": _boot(),
        }

    # -- room

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with open(Path(self.folder) / "lock", "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _files(self) -> list[tuple[float, int, Path]]:
        """Return (last use, bytes, path) of all shards and downloads, the oldest first."""
        found = []
        for path in Path(self.folder).iterdir():
            if path.suffix in (".shard", ".partial"):
                with suppress(OSError):
                    stat = path.stat()
                    found.append((stat.st_atime, stat.st_size, path))
        return sorted(found)

    def _total(self) -> int:
        return sum(size for _, size, _ in self._files())

    def _reserve(self, file: IO[bytes], size: int) -> bool:
        """Give a partial file its final size, if there is room. Raises OSError if the disk has none."""
        with self._locked():
            if not self._remove_oldest(self.limit_bytes - size):
                return False
            if size:
                os.posix_fallocate(file.fileno(), 0, size)
            return True

    def _remove_oldest(self, limit: int) -> bool:
        """Remove shards that no process reads until the rest has at most `limit` bytes. Return whether it has."""
        files = self._files()
        total = sum(size for _, size, _ in files)
        for _, size, path in files:
            is_left_behind = path.suffix == ".partial"
            if total > limit or is_left_behind:
                total -= size if _remove_unused(path) else 0
        return total <= limit

    # -- use

    def _usable(self, path: Path) -> IO[bytes] | None:
        """Return a cached shard, opened and locked, if it is there and whole."""
        try:
            file = open_local(str(path))
        except FileNotFoundError:
            return None
        fcntl.flock(file, fcntl.LOCK_SH)
        stat, about = os.fstat(file.fileno()), _read_json(path.with_suffix(".json"))
        if stat.st_nlink == 0:  # it was removed in between
            file.close()
            return None
        is_whole = (stat.st_size, stat.st_mtime_ns) == (about.get("size"), about.get("mtime_ns"))
        if is_whole and about.get("boot") != _boot():
            is_whole = hashlib.file_digest(file, "sha256").hexdigest() == about.get("sha256")
            if is_whole:
                _write_json(path.with_suffix(".json"), {**about, "boot": _boot()})
        if not is_whole:
            _log.warning("The cached copy of %s in %s is damaged. It is downloaded again.", about.get("url"), path)
            path.unlink(missing_ok=True)
            file.close()
            return None
        with suppress(OSError):
            os.utime(path, ns=(time.time_ns(), stat.st_mtime_ns))
        file.seek(0)
        return file


def _compare(shard: RemoteShard, size: int, digest: str) -> None:
    """Raise DataError if a download is not what the source or the index says."""
    if shard.size is not None and size != shard.size:
        facts = f"It should have {shard.size:,} bytes, and the download has {size:,}."
    elif shard.sha256 and digest != shard.sha256:
        facts = f"Its sha256 should be {shard.sha256[:16]}..., and that of the download is {digest[:16]}..."
    else:
        return
    raise DataError(f"The shard {shard.url} cannot be cached.", facts, "upload it again, with its index.")


def _is_at(file: IO[bytes], path: Path) -> bool:
    """Return whether an opened file is still the one at this path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _remove_unused(path: Path) -> bool:
    """Remove a file that no process has locked. Return whether it was removed."""
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(file, path):
                path.unlink()
                path.with_suffix(".json").unlink(missing_ok=True)
    except FileNotFoundError:
        return True
    except OSError:  # it is in use
        return False
    return True


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return parse(path.read_bytes()) or {}
    except OSError:
        return {}


def _write_json(path: Path, about: dict[str, Any]) -> None:
    draft = path.with_suffix(f".json.{os.getpid()}")
    try:
        draft.write_text(json.dumps(about), encoding="utf-8")
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def _boot() -> str:
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""
