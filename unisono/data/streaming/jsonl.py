"""JSON lines: a JSON value in each line of a file is one sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from unisono.data.streaming.files import (
    MOST_SAMPLE,
    DamagedSample,
    cached_index,
    compression,
    decode_json,
    expand,
    open_file,
)

BLOCK_BYTES = 1 << 20
"""Size of a read while a file is indexed."""


class JsonLines:
    """Shards (unisono.data.streaming.stream.Shards) of JSON-lines files."""

    def __init__(self, urls: str | Path | Sequence[str | Path]) -> None:
        self.names = expand(urls)

    def open(self, shard: int) -> LineReader | CompressedLineReader:
        url = self.names[shard]
        return CompressedLineReader(url) if compression(url) else LineReader(url)

    def decode(self, raw: bytes) -> Any:
        return decode_json(raw)


class LineReader:
    """The lines of an uncompressed file, by number."""

    def __init__(self, url: str) -> None:
        self._file = open_file(url)
        self._bounds: list[list[int]] = cached_index(url, self._scan)

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
        self._file.seek(begin)
        return self._file.read(end - begin)

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

    def __init__(self, url: str) -> None:
        self._url = url

    def __iter__(self) -> Iterator[bytes]:
        offset = 0
        with open_file(self._url) as file:
            while True:
                try:
                    line = file.readline(MOST_SAMPLE)
                except Exception as error:  # zlib, lzma and bz2 raise errors of their own types
                    raise DamagedSample(offset, f"It cannot be decompressed: {error}") from error
                if not line:
                    return
                if len(line) >= MOST_SAMPLE:
                    raise DamagedSample(offset, f"The line has more than {MOST_SAMPLE:,} bytes.")
                if line.strip():
                    yield line
                    offset += 1
