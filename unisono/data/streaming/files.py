"""Files as shards: which ones a pattern means, how they are opened, and where their samples begin."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import fsspec  # type: ignore[import-untyped]
from fsspec.utils import infer_compression  # type: ignore[import-untyped]

from unisono import environment
from unisono.errors import DataError

BRACES = re.compile(r"\{([^{}]*)\}")
VERSION = 1
"""Of what `indexed` keeps."""


def expand(urls: str | Path | Sequence[str | Path]) -> list[str]:
    """The files that are meant, sorted within each pattern. Raises DataError for a pattern that means none.

    {000..099} and {train,more} stand for each of their values, * and ? for what is there.
    """
    found: list[str] = []
    for url in [urls] if isinstance(urls, (str, Path)) else urls:
        some: list[str] = []
        for each in _braces(str(url)):
            files, path = fsspec.core.url_to_fs(each)
            if glob.has_magic(path):
                some += sorted(files.unstrip_protocol(p) if "://" in each else p for p in files.glob(path))
            else:
                some.append(each)
        if not some:
            raise DataError(f"Shards were to come from {url}.", "No file fits.", "look at the path and the pattern.")
        found += some
    return found


def _braces(url: str) -> Iterator[str]:
    match = BRACES.search(url)
    if match is None:
        yield url
        return
    first, dots, last = match[1].partition("..")
    if dots and first.isdigit() and last.isdigit():
        values = [f"{i:0{len(first)}}" for i in range(int(first), int(last) + 1)]
    else:
        values = match[1].split(",")
    for value in values:
        yield from _braces(url[: match.start()] + value + url[match.end() :])


def compression(url: str) -> str | None:
    """How a file is compressed, by its name; None: it can be entered anywhere."""
    return "gzip" if url.endswith(".tgz") else infer_compression(url)


def opened(url: str) -> IO[bytes]:
    """The file, unpacked while it is read. Raises DataError where it cannot be opened."""
    try:
        file: IO[bytes] = fsspec.open(url, "rb", compression=compression(url)).open()
    except (OSError, ImportError, ValueError) as error:
        raise DataError(
            f"The shard {url} was to be opened.", f"{type(error).__name__}: {error}", "look at it."
        ) from None
    return file


def indexed(url: str, make: Callable[[], Any]) -> Any:
    """What `make` finds out about a file, as JSON can hold it: from the last time, if the file is still the same.

    It is kept in the cache of the user; that it cannot be kept is no error, it only costs the time.
    """
    known = _kept(url)
    if known is not None:
        with suppress(OSError, ValueError):
            return json.loads(known.read_bytes())
    index = make()
    if known is not None:
        with suppress(OSError):
            known.parent.mkdir(parents=True, exist_ok=True)
            half = known.with_suffix(f".{os.getpid()}")
            half.write_text(json.dumps(index), encoding="utf-8")
            half.replace(known)
    return index


def _kept(url: str) -> Path | None:
    """Where what is known of a file is; None: nobody could tell that it has become another one."""
    try:
        files, path = fsspec.core.url_to_fs(url)
        facts = files.info(path)
    except (OSError, ImportError, ValueError):
        return None
    changed = next((facts[key] for key in ("mtime", "ETag", "etag", "LastModified", "updated") if facts.get(key)), None)
    if changed is None:
        return None
    where = os.path.abspath(path) if "://" not in url else url
    name = hashlib.sha256(repr((VERSION, where, facts.get("size"), str(changed))).encode()).hexdigest()
    return environment.cache() / "shards" / f"{name[:40]}.json"
