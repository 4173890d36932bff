"""JSON lines: a JSON value in each line of a file is one sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from unisono.data.streaming.files import (
    MOST_SAMPLE,
    DamagedSample,
    ShardFile,
    compression,
    decode_json,
    read_at,
)
from unisono.data.streaming.sample_offsets import LineOffsets
from unisono.errors import DataError

BLOCK_BYTES = 1 << 20
"""Size of a read while a file is indexed."""


class JsonLines:
    """Shards (unisono.data.streaming.stream.Shards) of JSON-lines files."""

    def __init__(self, files: Sequence[ShardFile]) -> None:
        self.files, self.names = files, [file.url for file in files]

    def open(self, shard: int) -> LineReader | CompressedLineReader:
        file = self.files[shard]
        return CompressedLineReader(file) if compression(file.url) else LineReader(file)

    def decode(self, raw: bytes) -> Any:
        return decode_json(raw)


class LineReader:
    """The lines of an uncompressed file, by number."""

    def __init__(self, file: ShardFile) -> None:
        self._file = file.open()
        self._offsets = file.index(self._scan, LineOffsets)

    def _scan(self) -> LineOffsets:
        """Return where every line is that is not empty."""
        ends: list[int] = []
        position = 0
        self._file.seek(0)
        while block := self._file.read(BLOCK_BYTES):
            ends += (np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == 10) + position).tolist()
            position += len(block)
        unfinished = [position] if position > (ends[-1] + 1 if ends else 0) else []
        offsets = LineOffsets()
        for before, end in pairwise([-1, *ends, *unfinished]):
            begin = before + 1
            if end - begin > 1 or (end > begin and self._read(begin, end).strip()):
                offsets.add(begin, end)
        return offsets

    def _read(self, begin: int, end: int) -> bytes:
        return read_at(self._file, begin, end - begin)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, offset: int) -> bytes:
        begin, end = self._offsets.begins[offset], self._offsets.ends[offset]
        line = self._read(begin, end)
        if len(line) < end - begin:
            raise DamagedSample(offset, f"The file ends at byte {begin + len(line):,}, but was longer when indexed.")
        return line

    def close(self) -> None:
        self._file.close()


class CompressedLineReader:
    """The lines of a compressed file, from its beginning."""

    def __init__(self, file: ShardFile) -> None:
        self._shard = file

    def __iter__(self) -> Iterator[bytes]:
        offset = 0
        with self._shard.open() as file:
            while True:
                try:
                    line = file.readline(MOST_SAMPLE)
                except DataError:  # the source is away
                    raise
                except Exception as error:  # zlib, lzma and bz2 raise errors of their own types
                    raise DamagedSample(offset, f"It cannot be decompressed: {error}") from error
                if not line:
                    return
                if len(line) >= MOST_SAMPLE:
                    raise DamagedSample(offset, f"The line has more than {MOST_SAMPLE:,} bytes.")
                if line.strip():
                    yield line
                    offset += 1
