"""Shards for tests: uneven ones, in every format, of numbered samples."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path

COUNTS = (7, 0, 13, 5)


def write_tars(folder: Path, counts: Sequence[int] = COUNTS, packed: bool = False) -> str:
    """Tars whose samples have a number, a text and a dict; returns the pattern that means them."""
    folder.mkdir(parents=True, exist_ok=True)
    ending, first = ("tar.gz" if packed else "tar"), 0
    for shard, count in enumerate(counts):
        with tarfile.open(folder / f"part-{shard}.{ending}", "w:gz" if packed else "w") as tar:
            for i in range(first, first + count):
                long = "long/" * 30 * (i == first + 3)  # needs a header of its own
                for name, content in (("cls", f"{i}"), ("txt", "ü" * i), ("more.json", json.dumps({"half": i / 2}))):
                    info = tarfile.TarInfo(f"{long}a.dir/{i:05d}.{name}")
                    info.size = len(content.encode())
                    tar.addfile(info, io.BytesIO(content.encode()))
        first += count
    return str(folder / f"part-{{0..{len(counts) - 1}}}.{ending}")


def write_lines(folder: Path, counts: Sequence[int] = COUNTS, packed: bool = False) -> str:
    """Lines of JSON, some of them empty, the last one of the last file without an end; returns the pattern."""
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
