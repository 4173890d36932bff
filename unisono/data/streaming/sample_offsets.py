"""Where the samples of a shard are: in memory, and as a JSON value in a file beside it or in the cache.

Both are columns of numbers. A list for each sample would take ten times as long to read and check, whenever a loader
worker opens a shard.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Member = tuple[str, int, int]
"""The extension of a member, its first byte, and its bytes."""


def _column() -> array[int]:
    return array("q")


@dataclass
class TarOffsets:
    """The members of each sample in a tar.

    Attributes:
        keys: of each sample.
        ends: for each sample, the number of members up to its last one.
        extensions: of each member.
        begins: the first byte of each member.
        sizes: the bytes of each member.
        problem: why the tar cannot be read after the last sample; "": it can.
    """

    keys: list[str] = field(default_factory=list)
    ends: array[int] = field(default_factory=_column)
    extensions: list[str] = field(default_factory=list)
    begins: array[int] = field(default_factory=_column)
    sizes: array[int] = field(default_factory=_column)
    problem: str = ""

    def __len__(self) -> int:
        return len(self.keys)

    def add(self, key: str, members: Iterable[Member]) -> None:
        """Add a sample."""
        for extension, begin, size in members:
            self.extensions.append(extension)
            self.begins.append(begin)
            self.sizes.append(size)
        self.keys.append(key)
        self.ends.append(len(self.begins))

    def sample(self, number: int) -> tuple[str, list[str], array[int], array[int]]:
        """Return the key of a sample, and of its members the extensions, first bytes and sizes."""
        begin, end = self.ends[number - 1] if number else 0, self.ends[number]
        return self.keys[number], self.extensions[begin:end], self.begins[begin:end], self.sizes[begin:end]

    def as_json(self) -> dict[str, Any]:
        """Return the columns as a JSON value."""
        names = {name: number for number, name in enumerate(dict.fromkeys(self.extensions))}
        return {
            "keys": self.keys,
            "ends": self.ends.tolist(),
            "names": list(names),
            "extensions": [names[extension] for extension in self.extensions],
            "begins": self.begins.tolist(),
            "sizes": self.sizes.tolist(),
            "problem": self.problem,
        }

    @classmethod
    def from_json(cls, value: Any) -> TarOffsets:
        """Return the columns from a JSON value. Raises ValueError if it is something else."""
        ends, extensions, begins, sizes = _numbers(value, "ends", "extensions", "begins", "sizes")
        keys, names, problem = value.get("keys"), value.get("names"), value.get("problem")
        if not _are_texts(keys) or not _are_texts(names) or not isinstance(problem, str):
            raise ValueError("it has no texts where keys and extensions are")
        if len(keys) != len(ends) or (ends[-1] if ends else 0) != len(begins) or not _ascend(ends):
            raise ValueError(f"it has {len(begins)} members, and says otherwise")
        if not len(extensions) == len(begins) == len(sizes) or max(extensions, default=-1) >= len(names):
            raise ValueError("it has members without an extension or size")
        if (np.asarray(begins)[:-1] + np.asarray(sizes)[:-1] > np.asarray(begins)[1:]).any():
            raise ValueError("it has members that begin before the last one ends")
        return cls(keys, ends, [names[number] for number in extensions], begins, sizes, problem)


@dataclass
class LineOffsets:
    """The lines of a text file that are samples.

    Attributes:
        begins: the first byte of each line.
        ends: the byte after each line.
    """

    begins: array[int] = field(default_factory=_column)
    ends: array[int] = field(default_factory=_column)

    def __len__(self) -> int:
        return len(self.begins)

    def add(self, begin: int, end: int) -> None:
        """Add a line."""
        self.begins.append(begin)
        self.ends.append(end)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self.begins, self.ends, strict=True)

    def as_json(self) -> dict[str, Any]:
        """Return the columns as a JSON value."""
        return {"begins": self.begins.tolist(), "ends": self.ends.tolist()}

    @classmethod
    def from_json(cls, value: Any) -> LineOffsets:
        """Return the columns from a JSON value. Raises ValueError if it is something else."""
        begins, ends = _numbers(value, "begins", "ends")
        if len(begins) != len(ends) or not (np.asarray(begins) <= np.asarray(ends)).all():
            raise ValueError("it has lines that end before they begin")
        return cls(begins, ends)


def _numbers(value: Any, *names: str) -> list[array[int]]:
    """Return columns of numbers from a JSON value. Raises ValueError if they are something else."""
    if not isinstance(value, dict):
        raise ValueError("it has no columns")
    try:
        found = [array("q", value[name]) for name in names]
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"a column is missing, or has something else than numbers: {error}") from None
    if any((np.asarray(column) < 0).any() for column in found):
        raise ValueError("a column has numbers below 0")
    return found


def _ascend(numbers: array[int]) -> bool:
    return bool((np.diff(np.asarray(numbers)) >= 0).all())


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and set(map(type, values)) <= {str}
