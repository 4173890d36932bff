"""The pictures of a folder with one folder per class, found by one scan and kept in few bytes.

A list of 200,000 names is 20 MB of Python objects in each process and loader worker, and copied there by and by, since
reading an object writes its reference count. Here the names are one array of bytes, and it stays shared after a fork.
The scan is cached: later runs and the other processes of a run only look whether a folder of a class has changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import time
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from unisono import DataError, cache_folder
from unisono.recipes.datasets.held_out import held_out
from unisono.recipes.vision.picture_files import SUFFIXES

VALID_SHARE = 0.1
"""The fraction of each class for validation, if the data set has no validation set of its own."""

SETTLED_SECONDS = 2.0
"""A folder that changed so short a time ago may change again without another modification time: it is not cached."""

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class PictureIndex:
    """The files of all classes, in the order of their names.

    Attributes:
        folder: Has one folder per class.
        classes: The names of the classes; a label is an index of them.
        names: The names of all files, one after the other: uint8 [bytes].
        ends: Where each name ends: int64 [files].
        labels: int32 [files].
        held: Whether a file is for validation if there is no other validation set: bool [files].
        ignored: How many other files there are.
    """

    folder: Path
    classes: tuple[str, ...]
    names: Array
    ends: Array
    labels: Array
    held: Array
    ignored: int = 0

    def __len__(self) -> int:
        return len(self.ends)

    def path(self, number: int) -> Path:
        """Return the path of a file."""
        begin = int(self.ends[number - 1]) if number else 0
        name = os.fsdecode(self.names[begin : int(self.ends[number])].tobytes())
        return self.folder / self.classes[self.labels[number]] / name


def index_pictures(folder: Path) -> PictureIndex:
    """Return the index of a folder, from the cache if no folder of a class has changed since.

    Raises:
        DataError: The folder cannot be read, has fewer than two classes, or has a class without pictures.
    """
    stamp, newest = _stamp(folder)
    path = cache_folder() / "pictures" / f"{hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:40]}.npz"
    saved = _load(path, stamp)
    if saved is not None:
        return replace(saved, folder=folder)
    began = time.time()
    index = _scan(folder)
    if began - newest > SETTLED_SECONDS:
        _save(path, index, stamp)
    return index


def _stamp(folder: Path) -> tuple[bytes, float]:
    """Return a digest of the classes and of the times when their folders changed, and the last of these times."""
    try:
        names = _class_names(folder)
        times = [os.stat(folder / name).st_mtime_ns for name in names]
    except OSError as error:
        raise _unreadable(folder, error) from None
    digest = hashlib.sha256(repr((names, times)).encode(errors="surrogateescape"))
    return digest.digest(), max(times, default=0) / 1e9


def _class_names(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def _unreadable(folder: Path, error: OSError) -> DataError:
    return DataError(
        f"Cannot find pictures in {folder}.",
        f"The system reports: {error.strerror}: {error.filename}. The current directory is {Path.cwd()}.",
        "--set data=FOLDER, which has one folder of pictures per class, or train/ and val/ with such folders.",
    )


def _scan(folder: Path) -> PictureIndex:
    classes = _class_names(folder)
    if len(classes) < 2:
        raise DataError(
            f"Cannot train on {folder}: it has fewer than two classes.",
            f"It has {len(classes)} folders{f' ({classes[0]})' if classes else ''}, one per class.",
            f"mkdir {shlex.quote(str(folder / 'OTHER_CLASS'))}, and put its pictures there.",
        )
    names = list[bytes]()
    held, counts = list[bool](), list[int]()
    ignored, empty = 0, list[DataError]()
    for name in classes:
        files, others = _pictures_of(folder / name)
        ignored += len(others)
        if not files:
            empty.append(_no_pictures(folder / name, others))
            continue
        chosen = held_out(files, VALID_SHARE, "unisono: pictures") if len(files) > 1 else set()
        names += map(os.fsencode, files)
        held += [file in chosen for file in files]
        counts.append(len(files))
    if empty:
        raise DataError.of([problem for error in empty[:5] for problem in error.problems])
    return PictureIndex(
        folder,
        tuple(classes),
        names=np.frombuffer(b"".join(names), np.uint8),
        ends=np.cumsum([len(name) for name in names], dtype=np.int64),
        labels=np.repeat(np.arange(len(classes), dtype=np.int32), counts),
        held=np.array(held),
        ignored=ignored,
    )


def _pictures_of(folder: Path) -> tuple[list[str], list[str]]:
    """Return the sorted names of the pictures in a folder, and those of other files and folders."""
    files, others = list[str](), list[str]()
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if not entry.name.startswith("."):
                    known = os.path.splitext(entry.name)[1].lower() in SUFFIXES
                    # A link to nothing counts as a picture, so that reading it names it.
                    (files if known and (entry.is_file() or entry.is_symlink()) else others).append(entry.name)
    except OSError as error:
        raise _unreadable(folder, error) from None
    return sorted(files), sorted(others)


def _no_pictures(folder: Path, others: Sequence[str]) -> DataError:
    has = f"It has {len(others)} other entries ({others[0]})" if others else "It is empty"
    return DataError(
        f"The class {folder} has no pictures.",
        f"{has}. Names of pictures end in {', '.join(sorted(SUFFIXES))}.",
        f"{'rm -r' if others else 'rmdir'} {shlex.quote(str(folder))}, or add pictures.",
    )


def _load(path: Path, stamp: bytes) -> PictureIndex | None:
    """Return the cached index; None if there is none, if it is of another time, or if it is damaged."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as saved:
            if saved["stamp"].tobytes() != stamp:
                return None
            return PictureIndex(
                Path(),
                tuple(json.loads(saved["classes"].tobytes())),
                names=saved["names"],
                ends=saved["ends"],
                labels=saved["labels"],
                held=saved["held"],
                ignored=int(saved["ignored"]),
            )
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _save(path: Path, index: PictureIndex, stamp: bytes) -> None:
    """Write the index to the cache. If that fails, on a full disk, say, the next run scans again."""
    partial = path.with_suffix(f".{os.getpid()}.npz")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(
            partial,
            stamp=np.frombuffer(stamp, np.uint8),
            classes=np.frombuffer(json.dumps(index.classes).encode(), np.uint8),
            names=index.names,
            ends=index.ends,
            labels=index.labels,
            held=index.held,
            ignored=np.int64(index.ignored),
        )
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink()
