"""Tar files in WebDataset's layout: neighbouring members that share a name up to its first dot are one sample.

    dog/0001.jpg  dog/0001.cls  dog/0002.jpg  dog/0002.cls      two samples, the first of them:
    {"__key__": "dog/0001", "jpg": b"...", "cls": 3}

https://github.com/webdataset/webdataset describes the layout. Members are found by hopping from header to header, so a
plain tar is entered anywhere; a compressed one is read from its beginning.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from unisono.data.streaming.files import compression, expand, indexed, opened
from unisono.data.streaming.stream import DamagedSample

Raw = tuple[str, dict[str, bytes]]
"""A sample's key, and its members' contents by extension."""


class TarShards:
    """Shards: see unisono.data.streaming.stream.Shards."""

    def __init__(self, urls: str | Path | Sequence[str | Path]) -> None:
        self.names = expand(urls)

    def open(self, shard: int) -> TarReader | PackedTarReader:
        url = self.names[shard]
        return PackedTarReader(url) if compression(url) else TarReader(url)

    def decode(self, raw: Raw) -> dict[str, Any]:
        key, members = raw
        return {"__key__": key, **{name: _decoded(name, content) for name, content in members.items()}}


def _decoded(extension: str, content: bytes) -> Any:
    kind = extension.rpartition(".")[2].lower()
    if kind in ("cls", "cls2", "index", "inx", "id"):
        return int(content)
    if kind in ("txt", "text", "transcript"):
        return content.decode("utf-8")
    if kind in ("json", "jsn"):
        return json.loads(content)
    if kind == "npy":
        return np.load(io.BytesIO(content), allow_pickle=False)
    return content


class TarReader:
    """The samples of a tar that can be entered anywhere."""

    def __init__(self, url: str) -> None:
        self._file = opened(url)
        self._samples, broken = indexed(url, self._scan)
        self.damage = DamagedSample(len(self._samples), broken) if broken else None

    def _scan(self) -> tuple[list[list[Any]], str]:
        """[key, [[extension, first byte, bytes], ...]] of every whole sample, and what is wrong behind the last."""
        self._file.seek(0)
        members = _Members(self._file)
        samples = [[key, [list(part) for part in parts]] for key, parts in _grouped(members)]
        return (samples[:-1], members.broken) if members.broken and samples else (samples, members.broken)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, offset: int) -> Raw:
        key, members = self._samples[offset]
        content = {}
        for extension, begin, size in members:
            self._file.seek(begin)
            content[extension] = self._file.read(size)
            if len(content[extension]) < size:
                raise DamagedSample(
                    offset, f"The file ends at byte {begin + len(content[extension]):,}, inside of {key}."
                )
        return key, content

    def close(self) -> None:
        self._file.close()


class PackedTarReader:
    """The samples of a compressed tar, from its beginning."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __iter__(self) -> Iterator[Raw]:
        offset = 0
        with opened(self._url) as file:
            members = _Members(file, contents=True)
            last: Raw | None = None
            for key, parts in _grouped(members):
                if last is not None:
                    yield last
                    offset += 1
                last = key, dict(parts)
            if members.broken:  # then the last one may lack members
                raise DamagedSample(offset, members.broken)
            if last is not None:
                yield last


class _Members:
    """Every file in a tar: (name, (first byte, bytes)), or with `contents` (name, content). Afterwards `broken` says,
    in a sentence, what was wrong behind the last one; "" if it ended as it should. (tarfile takes a broken header for
    the end.)
    """

    def __init__(self, file: IO[bytes], *, contents: bool = False) -> None:
        self.file, self.contents = file, contents
        self.broken = ""

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        try:
            with tarfile.open(fileobj=self.file, mode="r:") as tar:
                while (member := tar.next()) is not None:
                    tar.members = []  # type: ignore[attr-defined]  # it would keep them all
                    if not member.isreg():
                        continue
                    if self.contents:
                        taken = tar.extractfile(member)
                        assert taken is not None
                        yield member.name, taken.read()
                    else:
                        yield member.name, (member.offset_data, member.size)
                self.file.seek(tar.offset)
                header = self.file.read(tarfile.BLOCKSIZE)
                if header.strip(b"\0"):
                    self.broken = f"There is no tar header at byte {tar.offset:,}."
        except (tarfile.TarError, OSError, EOFError) as error:
            self.broken = f"{type(error).__name__}: {error}, near byte {_tell(self.file):,}."
        except Exception as error:  # zlib, lzma and bz2 have errors of their own
            if not self.contents:
                raise
            self.broken = f"It cannot be unpacked: {error}"


def _tell(file: IO[bytes]) -> int:
    try:
        return file.tell()
    except (OSError, ValueError):
        return 0


def _grouped(members: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, list[Any]]]:
    """Neighbours with one key: (key, [(extension, ...), ...]). Hidden files and those without extension are none."""
    key, parts = "", list[Any]()
    for name, what in members:
        folder, base = os.path.split(name)
        stem, dot, extension = base.partition(".")
        if not dot or not stem:
            continue
        now = os.path.join(folder, stem)
        if parts and now != key:
            yield key, parts
            parts = []
        key = now
        parts.append((extension, what) if isinstance(what, bytes) else (extension, *what))
    if parts:
        yield key, parts
