"""Tar files in WebDataset's layout: consecutive members that share a name up to its first dot are one sample.

    dog/0001.jpg  dog/0001.cls  dog/0002.jpg  dog/0002.cls      two samples, the first of them:
    {"__key__": "dog/0001", "jpg": b"...", "cls": 3}

https://github.com/webdataset/webdataset describes the layout. Indexing seeks from header to header, so the samples of
an uncompressed tar can be read in any order. A compressed tar is read from its beginning.

A tar is read, and never unpacked: names of members become keys and extensions, and no path. Only regular files are
members of samples. Links, devices and FIFOs are skipped.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from typing import IO, Any, cast

import numpy as np

from unisono.data.streaming.files import (
    MOST_SAMPLE,
    DamagedSample,
    ShardFile,
    compression,
    decode_json,
    read_at,
)
from unisono.data.streaming.sample_offsets import TarOffsets
from unisono.errors import DataError

MOST_EXTENSION = 1 << 20
"""Largest header of a tar with long names and other attributes, in bytes."""

GAP = 4096
"""Bytes between two members that are read along with them: headers and padding."""

NO_END = (
    "The file ends at byte {:,}, between two members, and lacks the zeros that end a tar. So it was cut off, or its "
    "writer did not finish it. If it has all members: truncate -s +1024 FILE."
)
"""The problem of a tar without the two blocks of zeros that POSIX requires at the end."""

Raw = tuple[str, dict[str, bytes]]
"""The key of a sample, and the contents of its members by extension."""


class TarShards:
    """Shards (unisono.data.streaming.stream.Shards) of tar files."""

    def __init__(self, files: Sequence[ShardFile]) -> None:
        self.files, self.names = files, [file.url for file in files]

    def open(self, shard: int) -> TarReader | CompressedTarReader:
        file = self.files[shard]
        return CompressedTarReader(file) if compression(file.url) else TarReader(file)

    def decode(self, raw: Raw) -> dict[str, Any]:
        key, members = raw
        sample: dict[str, Any] = {"__key__": key}
        for name, content in members.items():
            decoder = _decoder_of(name)
            sample[name] = content if decoder is None else decoder(content)
        return sample


@lru_cache(maxsize=1024)
def _decoder_of(extension: str) -> Callable[[bytes], Any] | None:
    """Return the function that decodes a member; None: its content is the value."""
    kind = extension.rpartition(".")[2].lower()
    if kind in ("cls", "cls2", "index", "inx", "id"):
        return int
    if kind in ("txt", "text", "transcript"):
        return partial(str, encoding="utf-8")
    if kind in ("json", "jsn"):
        return decode_json
    return _decode_array if kind == "npy" else None


def _decode_array(content: bytes) -> Any:
    """Return an array in numpy's format. Its header may promise more elements than follow, and of any type."""
    try:
        return np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    except Exception as error:  # of the parser of the header, of dtypes, MemoryError
        raise ValueError(f"{type(error).__name__}: {error}") from None


class TarReader:
    """The samples of an uncompressed tar, by number. `damage` is set if the file cannot be read to its end."""

    def __init__(self, file: ShardFile) -> None:
        self._file = file.open()
        self._offsets = offsets = file.index(self._scan, TarOffsets)
        self.damage = DamagedSample(len(offsets), offsets.problem) if offsets.problem else None

    def _scan(self) -> TarOffsets:
        """Return where every complete sample is, and the problem after the last one."""
        self._file.seek(0)
        members = _Members(self._file)
        samples = list(_group_by_key(members))
        if members.problem and samples:
            samples.pop()  # it may lack members
        offsets = TarOffsets(problem=members.problem)
        for key, parts in samples:
            offsets.add(key, parts)
        return offsets

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, offset: int) -> Raw:
        key, extensions, begins, sizes = self._offsets.sample(offset)
        if not begins:
            return key, {}
        first, length = begins[0], begins[-1] + sizes[-1] - begins[0]
        parts = zip(extensions, begins, sizes, strict=True)
        if length > sum(sizes) + GAP * len(sizes):
            return key, {extension: self._read(begin, size, offset) for extension, begin, size in parts}
        content = self._read(first, length, offset)  # all members at once
        return key, {extension: content[begin - first : begin - first + size] for extension, begin, size in parts}

    def _read(self, begin: int, size: int, offset: int) -> bytes:
        content = read_at(self._file, begin, size)
        if len(content) < size:
            name = self._offsets.keys[offset]
            raise DamagedSample(offset, f"The file ends at byte {begin + len(content):,}, inside {name}.")
        return content

    def close(self) -> None:
        self._file.close()


class CompressedTarReader:
    """The samples of a compressed tar, from its beginning."""

    def __init__(self, file: ShardFile) -> None:
        self._shard = file

    def __iter__(self) -> Iterator[Raw]:
        offset = 0
        with self._shard.open() as file:
            members = _Members(file, contents=True)
            last: Raw | None = None
            for key, parts in _group_by_key(members):
                if last is not None:
                    yield last
                    offset += 1
                last = key, dict(parts)
            if members.problem:  # then the last sample may lack members
                raise DamagedSample(offset, members.problem)
            if last is not None:
                yield last


class _BoundedReads:
    """A file of which one read returns at most `most` bytes: tarfile reads as much as a header of a tar says."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.most = file, MOST_EXTENSION
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= self.most:
            raise tarfile.ReadError(f"a header asks for {size:,} bytes, and at most {self.most:,} are read")
        return self._file.read(size)


class _Members:
    """Iterate over the files in a tar: (name, (first byte, bytes)), or with `contents` (name, content).

    After the iteration `problem` is a sentence about what is wrong after the last member, or "". (tarfile takes a
    broken header for the end of the archive.)
    """

    def __init__(self, file: IO[bytes], *, contents: bool = False) -> None:
        self.file, self.contents = file, contents
        self.problem = ""

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        try:
            reads, before = _BoundedReads(self.file), -1
            with tarfile.open(fileobj=cast(IO[bytes], reads), mode="r:") as tar:
                while (member := tar.next()) is not None:
                    tar.members = []  # type: ignore[attr-defined]  # else it keeps all of them in memory
                    before = _check_member(tar, member, before)
                    if not member.isreg():
                        continue
                    if self.contents:
                        content = tar.extractfile(member)
                        assert content is not None
                        reads.most = max(MOST_EXTENSION, min(member.size, MOST_SAMPLE))
                        yield member.name, content.read()
                        reads.most = MOST_EXTENSION
                    else:
                        yield member.name, (member.offset_data, member.size)
                self.file.seek(tar.offset)
                header = self.file.read(tarfile.BLOCKSIZE)
                if not header:
                    self.problem = NO_END.format(tar.offset)
                elif header.strip(b"\0"):
                    self.problem = f"There is no tar header at byte {tar.offset:,}."
        except DataError:  # the source is away
            raise
        except (tarfile.TarError, OSError, EOFError) as error:
            self.problem = f"{type(error).__name__}: {error}, near byte {_position(self.file):,}."
        except Exception as error:  # zlib, lzma and bz2 raise errors of their own types; headers may be anything
            words = "It cannot be decompressed" if self.contents else type(error).__name__
            self.problem = f"{words}: {error}"


def _check_member(tar: tarfile.TarFile, member: tarfile.TarInfo, before: int) -> int:
    """Return the offset of the next header. Raises ReadError unless it is after the last one, and sizes are possible.

    Args:
        tar: The archive, which has read the header of `member`.
        member: The member.
        before: The offset that was returned for the last member.
    """
    if member.size < 0 or tar.offset <= before:
        raise tarfile.ReadError(f"a member has {member.size:,} bytes")
    if member.issparse():
        raise tarfile.ReadError("a member is a sparse file, whose size is not that of its content")
    return tar.offset


def _position(file: IO[bytes]) -> int:
    try:
        return file.tell()
    except (OSError, ValueError):
        return 0


def _group_by_key(members: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, list[Any]]]:
    """Yield (key, [(extension, ...), ...]) of consecutive members. Skip hidden files and those without an extension."""
    key, parts = "", list[Any]()
    for name, value in members:
        folder, base = os.path.split(name)
        stem, dot, extension = base.partition(".")
        if not dot or not stem:
            continue
        this_key = os.path.join(folder, stem)
        if parts and this_key != key:
            yield key, parts
            parts = []
        key = this_key
        parts.append((extension, value) if isinstance(value, bytes) else (extension, *value))
    if parts:
        yield key, parts
