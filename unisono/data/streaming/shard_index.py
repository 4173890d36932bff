"""The index of a folder of shards, which `unisono shards` writes: what each shard is, and how many samples it has.

index.json              {"format": 2, "kind": "tar", "shards": [{"name", "samples", "bytes", "sha256"}, ...], ...}
shard-00000.tar
shard-00000.tar.json    where the samples of this shard begin
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from unisono.data.streaming.files import ShardFile, refuse_scheme
from unisono.data.streaming.shard_cache import ShardCache
from unisono.errors import DataError
from unisono.json_forms import parse_value

INDEX = "index.json"
FORMAT = 2
NAME = re.compile(r"[\w-][\w.-]*")
"""Names of shards: files in the folder of the index, and nothing else."""


@dataclass(frozen=True)
class ShardEntry:
    """A shard in an index."""

    name: str
    samples: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class ShardIndex:
    """An index.

    Attributes:
        kind: "tar" or "jsonl".
        shards: in order.
        classes: names of the classes, if each was a folder.
        source: a hash of what the shards were written from, and how.
        folder: path or URL of the folder.
    """

    kind: Literal["tar", "jsonl"]
    shards: tuple[ShardEntry, ...]
    classes: tuple[str, ...] = ()
    source: str = ""
    folder: str = ""

    def files(self, cache: ShardCache | None) -> Sequence[ShardFile]:
        """Return the files of the shards."""
        urls = [f"{self.folder}/{entry.name}" for entry in self.shards]
        return [
            ShardFile(url, cache, entry.bytes, entry.sha256, offsets_of(url), entry.samples)
            for url, entry in zip(urls, self.shards, strict=True)
        ]

    def text(self) -> str:
        """Return the content of the index."""
        value = {"format": FORMAT, "samples": sum(entry.samples for entry in self.shards), **asdict(self)}
        del value["folder"]
        return json.dumps(value, indent=1) + "\n"


def offsets_of(name: str) -> str:
    """Return the name of the file that says where the samples of a shard begin."""
    return f"{name}.json"


def read_index(url: str | Path) -> ShardIndex:
    """Return the index of a folder, or of the file index.json itself.

    Raises:
        DataError: there is none, or it is broken.
    """
    folder = str(url).rstrip("/").removesuffix(f"/{INDEX}")
    path = f"{folder}/{INDEX}"
    refuse_scheme(path)
    with ShardFile(path).open() as file:
        text = file.read()
    try:
        return parse_index(text, folder)
    except (ValueError, KeyError, TypeError) as error:
        why = f"It has no {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
        raise DataError(
            f"The index {path} is broken.", f"{why}.", "write it again: unisono shards FOLDER OUT --force"
        ) from None


def parse_index(text: bytes, folder: str) -> ShardIndex:
    """Return an index from its content. Raises ValueError, KeyError or TypeError."""
    value = parse_value(text)
    if not isinstance(value, dict) or value["format"] != FORMAT:
        raise ValueError(f"its format is not {FORMAT}")
    if value["kind"] not in ("tar", "jsonl"):
        raise ValueError(f"its kind is {value['kind']!r}")
    shards = tuple(map(_entry, value["shards"]))
    if not shards:
        raise ValueError("it has no shards")
    classes = tuple(map(str, value.get("classes", ())))
    return ShardIndex(value["kind"], shards, classes, str(value.get("source", "")), folder)


def _entry(value: Any) -> ShardEntry:
    name, samples, size, digest = value["name"], value["samples"], value["bytes"], value["sha256"]
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a shard")
    if not all(type(number) is int and number >= 0 for number in (samples, size)):
        raise ValueError(f"the shard {name} has {samples!r} samples and {size!r} bytes")
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        raise ValueError(f"the shard {name} has no checksum")
    return ShardEntry(name, samples, size, digest)
