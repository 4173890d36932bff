"""JSON lines: a JSON value in each line of a file, one sample each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from unisono.data.streaming.files import compression, expand, indexed, opened
from unisono.data.streaming.stream import DamagedSample

BLOCK = 1 << 20


class JsonLines:
    """Shards: see unisono.data.streaming.stream.Shards."""

    def __init__(self, urls: str | Path | Sequence[str | Path]) -> None:
        self.names = expand(urls)

    def open(self, shard: int) -> LineReader | PackedLineReader:
        url = self.names[shard]
        return PackedLineReader(url) if compression(url) else LineReader(url)

    def decode(self, raw: bytes) -> Any:
        return json.loads(raw)


class LineReader:
    """The lines of a file that can be entered anywhere."""

    def __init__(self, url: str) -> None:
        self._file = opened(url)
        self._bounds: list[list[int]] = indexed(url, self._scan)

    def _scan(self) -> list[list[int]]:
        """[begin, end] of every line that is not empty, in bytes."""
        ends: list[int] = []
        at = 0
        self._file.seek(0)
        while block := self._file.read(BLOCK):
            ends += (np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == 10) + at).tolist()
            at += len(block)
        cuts = [-1, *ends, *([at] if at > (ends[-1] + 1 if ends else 0) else [])]
        bounds = [[before + 1, end] for before, end in pairwise(cuts)]
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
            raise DamagedSample(offset, f"The file ends at byte {begin + len(line):,}, though it was longer.")
        return line

    def close(self) -> None:
        self._file.close()


class PackedLineReader:
    """The lines of a compressed file, from its beginning."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __iter__(self) -> Iterator[bytes]:
        offset = 0
        with opened(self._url) as file:
            while True:
                try:
                    line = file.readline()
                except Exception as error:  # zlib, lzma and bz2 have errors of their own
                    raise DamagedSample(offset, f"It cannot be unpacked: {error}") from error
                if not line:
                    return
                if line.strip():
                    yield line
                    offset += 1
