"""Data that needs no download: the Python standard library's own source code, as bytes.

It lies beside every Python, on every system, and is free to use (PSF licence). Its text belongs to the Python that
runs: another version of Python is another corpus, and so another run. The digest in `Corpus.line()` tells them apart.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from unisono import DataError

IGNORED = -100
"""The target that counts for nothing: what `torch.nn.functional.cross_entropy` ignores by default."""

VALID_SHARE = 0.05
"""The share of files (not of bytes) that are kept for validation."""

_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
# Written when Python was built or installed, so different on two machines that have the same Python.
_MACHINE_FOLDERS = ("config-", "lib-")
_MACHINE_FILES = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize")


@dataclass(frozen=True)
class Corpus:
    """Text in two parts. A file is wholly in one of them."""

    name: str
    licence: str
    files: int
    train: bytes
    valid: bytes
    digest: str
    """The first 12 digits of the sha256 over all paths and contents: equal digests, equal data."""

    def line(self) -> str:
        """What the data is, how much, under which licence: one line."""
        return (
            f"{self.name}: {self.files} files, {len(self.train) / 1e6:.1f} MB to train on, "
            f"{len(self.valid) / 1e6:.2f} MB to validate on, licence {self.licence}, digest {self.digest}"
        )


def python_source(folder: Path | None = None) -> Corpus:
    """The source code of the standard library (about 11 MB, without its tests), read in about 0.2 seconds.

    A file goes to validation by a keyed hash of its path below `folder`, so a file that another version of Python adds
    moves no other. Training files are sorted by path, validation files by their hash: any beginning of the validation
    text is then a fair sample of the whole library. DataError when Python was installed without its source.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    paths = _source_paths(folder)
    if len(paths) < 2:
        raise DataError(
            "The text recipe was asked to train on the source code of Python's standard library.",
            f"{folder} has {len(paths)} .py files.",
            "Run it with a Python that has its source, from python.org, pyenv, conda or your system's packages.",
        )
    digest = hashlib.sha256()
    train: list[bytes] = []
    valid: list[tuple[float, bytes]] = []
    for path in paths:
        text = (folder / path).read_bytes()
        digest.update(f"{path}\0{len(text)}\0".encode() + text)
        draw = _draw(path)
        if draw < VALID_SHARE:
            valid.append((draw, text))
        else:
            train.append(text)
    return Corpus(
        name=f"source code of Python {platform.python_version()}'s standard library",
        licence="PSF",
        files=len(paths),
        train=b"".join(train),
        valid=b"".join(text for _, text in sorted(valid)),
        digest=digest.hexdigest()[:12],
    )


def _source_paths(folder: Path) -> list[str]:
    """The .py files below `folder`, as sorted posix paths: no tests, nothing added later or by this machine."""
    found = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [f for f in folders if f not in _SKIPPED_FOLDERS and not f.startswith(_MACHINE_FOLDERS)]
        here = Path(parent).relative_to(folder)
        found += [(here / f).as_posix() for f in files if f.endswith(".py") and not f.startswith(_MACHINE_FILES)]
    return sorted(found)


def _draw(path: str) -> float:
    """A number in [0, 1) that depends on `path` alone; the key makes the split this recipe's own."""
    digest = hashlib.blake2b(path.encode(), digest_size=8, key=b"unisono: validation").digest()
    return int.from_bytes(digest) / 2**64


class ByteWindows(Dataset[tuple[Tensor, Tensor]]):
    """Text as (tokens, targets) windows of `length` bytes each, for a model that predicts the next byte.

    The windows do not overlap and their targets are the text, every byte exactly once: token j of a window is the byte
    before its target j, and before the first byte of all there is a line feed. All windows have one shape, so batches
    need no collating: where the text ends inside the last window, its targets go on as IGNORED. Count the others with
    `(targets != IGNORED).sum()`.
    """

    def __init__(self, text: bytes, length: int) -> None:
        if length < 1:
            raise DataError(
                "ByteWindows was asked to cut a text.", f"The windows' length is {length}.", "Ask for >= 1."
            )
        self.length = length
        self.bytes = len(text)
        self._text = torch.frombuffer(bytearray(b"\n" + text), dtype=torch.uint8)  # torch wants memory it may write to

    def __len__(self) -> int:
        return -(-self.bytes // self.length)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        window = self._text[index * self.length : (index + 1) * self.length + 1].long()
        tokens, targets = window[:-1], window[1:]
        missing = self.length - len(targets)
        if missing:
            tokens = torch.nn.functional.pad(tokens, (0, missing))
            targets = torch.nn.functional.pad(targets, (0, missing), value=IGNORED)
        return tokens, targets
