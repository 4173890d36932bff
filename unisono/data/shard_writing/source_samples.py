"""The samples in a folder: what belongs to each, and in which order they are written. A function of names and sizes.

classes   dog/1.jpg  dog/2.jpg  cat/1.jpg        a file is a sample, and its folder the class: {"jpg", "cls"}
files     0001.jpg  0001.json  0002.jpg  ...     files that share a name up to its first dot are a sample
lines     a.jsonl  b.jsonl                       a line is a sample
"""

from __future__ import annotations

import hashlib
import os
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from unisono.config.wording import plural
from unisono.errors import DataError
from unisono.plan.rng_keys import SHARDS, mix, shuffled

Form = Literal["classes", "files", "lines"]
Order = Literal["shuffled", "sorted"]

LINES = (".jsonl", ".ndjson")
PACKED_LINES = tuple(f"{end}{packed}" for end in LINES for packed in (".gz", ".bz2", ".xz", ".zst"))
LINE_FEED = 10
BLOCK = 1 << 20
"""Bytes of one read while lines are found."""


class Part(NamedTuple):
    """A part of a sample: a file, or some of its bytes.

    Attributes:
        extension: its key in the sample.
        path: the file.
        begin: first byte.
        size: in bytes.
    """

    extension: str
    path: Path
    begin: int
    size: int


class SourceSample(NamedTuple):
    """A sample to write.

    Attributes:
        key: its name in a tar.
        parts: its files, or one line.
        label: number of its class; -1: it has none.
    """

    key: str
    parts: tuple[Part, ...]
    label: int = -1

    @property
    def size(self) -> int:
        """Return the bytes that it takes in a tar, about."""
        return sum(512 + -(-part.size // 512) * 512 for part in self.parts) + (1024 if self.label >= 0 else 0)


class LineSamples(Sequence[SourceSample]):
    """The lines of files as samples, 24 bytes each.

    Attributes:
        paths: the files.
        places: [file, first byte, bytes] of each line, int64 [lines, 3].
    """

    def __init__(self, paths: Sequence[Path], places: npt.NDArray[np.int64]) -> None:
        self.paths, self.places = paths, places

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, number: int) -> SourceSample: ...
    @overload
    def __getitem__(self, number: slice) -> LineSamples: ...
    def __getitem__(self, number: int | slice) -> SourceSample | LineSamples:
        if isinstance(number, slice):
            return LineSamples(self.paths, self.places[number])
        file, begin, size = self.places[number].tolist()
        return SourceSample("", (Part("jsonl", self.paths[file], begin, size),))

    def in_order(self, permutation: npt.NDArray[np.int64]) -> LineSamples:
        """Return the lines in another order."""
        return LineSamples(self.paths, self.places[permutation])


@dataclass(frozen=True)
class Source:
    """All samples of a folder, in the order in which they are written."""

    form: Form
    samples: Sequence[SourceSample]
    classes: tuple[str, ...] = ()

    def digest(self, *more: object) -> str:
        """Return a hash of the names and sizes of everything, in order."""
        digest = hashlib.sha256(repr((self.form, self.classes, more)).encode())
        if isinstance(self.samples, LineSamples):
            digest.update(repr([path.name for path in self.samples.paths]).encode("utf-8", "surrogateescape"))
            digest.update(self.samples.places.tobytes())
            return digest.hexdigest()
        for sample in self.samples:
            parts = [(part.extension, part.path.name, part.begin, part.size) for part in sample.parts]
            digest.update(repr((sample.key, sample.label, parts)).encode("utf-8", "surrogateescape"))
        return digest.hexdigest()


def find_samples(folder: Path, form: Form | None, order: Order | None, seed: int) -> Source:
    """Return the samples of a folder, or of one file of JSON lines.

    Args:
        folder: where they are.
        form: how they are stored; None: by what is in the folder.
        order: shuffled or sorted by name; None: shuffled, but lines keep their order.
        seed: of the shuffle.

    Raises:
        DataError: there are none, or they do not have this form.
    """
    try:
        form = form or guess_form(folder)
        source = {"classes": _classes, "files": _files, "lines": _lines}[form](folder)
    except OSError as error:
        raise DataError(f"Cannot read {error.filename}.", f"{error.strerror}.", "check the path.") from None
    if not source.samples:
        raise DataError(f"There are no samples in {folder}.", f"They were searched as {form}.", "check the folder.")
    if (order or ("sorted" if form == "lines" else "shuffled")) == "sorted":
        return source
    permutation = shuffled(len(source.samples), mix(seed, SHARDS))
    if isinstance(source.samples, LineSamples):
        return Source(form, source.samples.in_order(permutation), source.classes)
    return Source(form, [source.samples[number] for number in permutation.tolist()], source.classes)


def guess_form(folder: Path) -> Form:
    """Return how samples are stored in a folder. Raises DataError if that is not clear."""
    if folder.is_file():
        return "lines"
    entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
    folders = [entry.name for entry in entries if entry.is_dir()]
    files = [entry.name for entry in entries if not entry.is_dir()]
    if files and all(name.endswith((*LINES, *PACKED_LINES)) for name in files) and not folders:
        return "lines"
    if folders and files:
        raise DataError(
            f"{folder} has {plural(len(folders), 'folder')} and {plural(len(files), 'file')}.",
            f"So {folders[0]} may be a class or a part of names; {files[0]} is beside it.",
            f"move the files elsewhere, or say which it is: unisono shards {folder} OUT --form classes, or files",
        )
    return "classes" if folders else "files"


def _walk(folder: Path) -> Iterator[tuple[str, Path, int]]:
    """Yield (path below the folder, path, bytes) of its regular files, sorted; hidden ones are left out."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(place, name)
            if not name.startswith(".") and path.is_file():
                yield path.relative_to(folder).as_posix(), path, path.stat().st_size


def _classes(folder: Path) -> Source:
    classes = tuple(sorted(e.name for e in os.scandir(folder) if e.is_dir() and not e.name.startswith(".")))
    samples = []
    for label, name in enumerate(classes):
        found = list(_walk(folder / name))
        if not found:
            raise DataError(
                f"The class {name} has no files.",
                f"{folder / name} is one of {plural(len(classes), 'folder')} of classes, and is empty.",
                f"rmdir {shlex.quote(str(folder / name))}, or fill it. Labels are numbers in the order of the names.",
            )
        stems = Counter(path.rpartition(".")[0] for path, _, _ in found)
        for below, path, size in found:
            stem, _, extension = below.rpartition(".")
            if not stem or "/" in extension:
                raise DataError(f"{path} has no extension.", "It becomes the key of the sample.", "rename the file.")
            place, _, base = stem.rpartition("/")
            base = _escaped(base) + (f"%2E{extension}" if stems[stem] > 1 else "")
            key = "/".join([name, *([place] if place else []), base])
            samples.append(SourceSample(key, (Part(extension.lower(), path, 0, size),), label))
    return Source("classes", samples, classes)


def _escaped(name: str) -> str:
    """Return a name without dots, which end the key of a sample in a tar."""
    return name.replace("%", "%25").replace(".", "%2E")


def _files(folder: Path) -> Source:
    groups: dict[str, list[Part]] = {}
    for below, path, size in _walk(folder):
        place, _, base = below.rpartition("/")
        stem, dot, extension = base.partition(".")
        if not dot:
            raise DataError(f"{path} has no extension.", "It becomes the key in a sample.", "rename the file.")
        groups.setdefault(f"{place}/{stem}" if place else stem, []).append(Part(extension, path, 0, size))
    return Source("files", [SourceSample(key, tuple(groups[key])) for key in sorted(groups)])


def _lines(folder: Path) -> Source:
    paths = [folder] if folder.is_file() else [path for _, path, _ in _walk(folder)]
    found = [np.empty((0, 3), dtype=np.int64)]
    for number, path in enumerate(paths):
        if path.name.endswith(PACKED_LINES):
            raise DataError(
                f"{path} is compressed.",
                "Lines are written in parts, so each must be read at its place.",
                "decompress it first; or use it as it is: unisono.Stream.json_lines reads compressed files.",
            )
        if not path.name.endswith(LINES) and path != folder:
            fact = f"Its name does not end with {' or '.join(LINES)}."
            raise DataError(f"{path} is no file of JSON lines.", fact, "rename it, or move it elsewhere.")
        begins, ends = line_bounds(path)
        found.append(np.stack([np.full_like(begins, number), begins, ends - begins], axis=1))
    return Source("lines", LineSamples(paths, np.concatenate(found)))


def line_bounds(path: Path) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the first bytes of the lines that are not empty, and the bytes after them, without line feeds."""
    ends, position = [np.empty(0, dtype=np.int64)], 0
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            ends.append(np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == LINE_FEED) + position)
            position += len(block)
    stops = np.append(np.concatenate(ends), position)  # the last line may have no line feed
    begins = np.append(0, stops[:-1] + 1)
    return begins[stops > begins], stops[stops > begins]
