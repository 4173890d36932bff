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


def line_offsets(value: Any) -> list[list[int]]:
    """Return the bounds of each line. Raises ValueError if the value is something else."""
    for bounds in value if isinstance(value, list) else [value]:
        is_pair = isinstance(bounds, list) and len(bounds) == 2 and all(type(number) is int for number in bounds)
        if not is_pair or not 0 <= bounds[0] <= bounds[1]:
            raise ValueError(f"{str(bounds)[:60]} are no bounds of a line")
    lines: list[list[int]] = value
    return lines


class LineReader:
    """The lines of an uncompressed file, by number."""

    def __init__(self, file: ShardFile) -> None:
        self._file = file.open()
        self._bounds: list[list[int]] = file.index(self._scan, line_offsets)

    def _scan(self) -> list[list[int]]:
        """Return [begin, end] in bytes of every line that is not empty."""
        ends: list[int] = []
        position = 0
        self._file.seek(0)
        while block := self._file.read(BLOCK_BYTES):
            ends += (np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == 10) + position).tolist()
            position += len(block)
        unfinished = [position] if position > (ends[-1] + 1 if ends else 0) else []
        bounds = [[before + 1, end] for before, end in pairwise([-1, *ends, *unfinished])]
        return [[a, b] for a, b in bounds if b - a > 1 or (b > a and self._read(a, b).strip())]

    def _read(self, begin: int, end: int) -> bytes:
        return read_at(self._file, begin, end - begin)

    def __len__(self) -> int:
        return len(self._bounds)

    def __getitem__(self, offset: int) -> bytes:
        begin, end = self._bounds[offset]
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
