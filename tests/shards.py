"""Write shards of numbered samples for tests, in each format and of different sizes."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path

COUNTS = (7, 0, 13, 5)


def write_tars(folder: Path, counts: Sequence[int] = COUNTS, packed: bool = False) -> str:
    """Write tar files whose samples have a number, a text and a dict, and return their pattern."""
    folder.mkdir(parents=True, exist_ok=True)
    suffix, first = ("tar.gz" if packed else "tar"), 0
    for shard, count in enumerate(counts):
        with tarfile.open(folder / f"part-{shard}.{suffix}", "w:gz" if packed else "w") as tar:
            for i in range(first, first + count):
                long = "long/" * 30 * (i == first + 3)  # needs an extended header
                for name, content in (("cls", f"{i}"), ("txt", "ü" * i), ("more.json", json.dumps({"half": i / 2}))):
                    info = tarfile.TarInfo(f"{long}a.dir/{i:05d}.{name}")
                    info.size = len(content.encode())
                    tar.addfile(info, io.BytesIO(content.encode()))
        first += count
    return str(folder / f"part-{{0..{len(counts) - 1}}}.{suffix}")


def write_lines(folder: Path, counts: Sequence[int] = COUNTS, packed: bool = False) -> str:
    """Write JSON lines, with empty lines and without a final line feed, and return their pattern."""
    folder.mkdir(parents=True, exist_ok=True)
    first = 0
    for shard, count in enumerate(counts):
        lines = [f'{{"cls": {i}, "txt": "{"ü" * i}"}}' + "\n" * (1 + i % 3) for i in range(first, first + count)]
        content = "".join(["\n", *lines]).encode()
        if shard == len(counts) - 1:
            content = content.rstrip()
        name = folder / f"part-{shard}.jsonl{'.gz' * packed}"
        name.write_bytes(gzip.compress(content) if packed else content)
        first += count
    return str(folder / f"part-*.jsonl{'.gz' * packed}")
