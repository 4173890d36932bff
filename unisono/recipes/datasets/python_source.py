"""The source code of Python's standard library, as bytes. It comes with Python: no download.

It is free to use (PSF license). Another version of Python has another source code, so the results of a run differ. The
digest in `Corpus.summary()` identifies the data.
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
from unisono.recipes.datasets.held_out import HASH_RANGE, keyed_hash

IGNORED = -100
"""The default `ignore_index` of `torch.nn.functional.cross_entropy`."""

VALID_SHARE = 0.05
"""The fraction of files (not of bytes) for validation."""

_HASH_KEY = "unisono: validation"

_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
# Generated when Python was built or installed, so machines with the same Python differ.
_MACHINE_FOLDERS = ("config-", "lib-")
_MACHINE_FILES = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize")


@dataclass(frozen=True)
class Corpus:
    """Text for training and validation. Each file is in one of the two."""

    name: str
    license: str
    files: int
    train: bytes
    valid: bytes
    digest: str
    """The first 12 digits of the sha256 over all paths and contents: equal digests, equal data."""

    def summary(self) -> str:
        """Return name, size, license and digest, in one line."""
        return (
            f"{self.name}: {self.files} files, {len(self.train) / 1e6:.1f} MB for training, "
            f"{len(self.valid) / 1e6:.2f} MB for validation, license {self.license}, digest {self.digest}"
        )


def load_python_source(folder: Path | None = None) -> Corpus:
    """Load the source code of the standard library (about 11 MB without its tests) in about 0.2 seconds.

    A hash of a file's path decides whether it is for validation, so files that another version of Python adds do not
    change the part of other files. Training files are sorted by path. Validation files are sorted by hash, so that each
    prefix of the validation text is a random sample of the library.

    Raises:
        DataError: Python is installed without its source code.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    paths = _source_paths(folder)
    if len(paths) < 2:
        raise DataError(
            "Cannot load the source code of Python's standard library: it is not installed.",
            f"{folder} has {len(paths)} .py files.",
            "Use a Python with its source code, from python.org, pyenv, conda or your system's packages.",
        )
    digest = hashlib.sha256()
    train: list[bytes] = []
    valid: list[tuple[int, bytes]] = []
    for path in paths:
        text = (folder / path).read_bytes()
        digest.update(f"{path}\0{len(text)}\0".encode() + text)
        hashed = keyed_hash(path, _HASH_KEY)
        if hashed < VALID_SHARE * HASH_RANGE:
            valid.append((hashed, text))
        else:
            train.append(text)
    return Corpus(
        name=f"source code of Python {platform.python_version()}'s standard library",
        license="PSF",
        files=len(paths),
        train=b"".join(train),
        valid=b"".join(text for _, text in sorted(valid)),
        digest=digest.hexdigest()[:12],
    )


def _source_paths(folder: Path) -> list[str]:
    """List the .py files in `folder` as sorted POSIX paths, without tests, installed packages and generated files."""
    found = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [f for f in folders if f not in _SKIPPED_FOLDERS and not f.startswith(_MACHINE_FOLDERS)]
        here = Path(parent).relative_to(folder)
        found += [(here / f).as_posix() for f in files if f.endswith(".py") and not f.startswith(_MACHINE_FILES)]
    return sorted(found)


class ByteWindows(Dataset[tuple[Tensor, Tensor]]):
    """Windows (tokens, targets) of `length` bytes of a text, for a model that predicts the next byte.

    Each byte of the text is a target exactly once. Token j of a window is the byte before target j; the byte before the
    text is a line feed. The last window is padded with targets IGNORED to the same length, so that windows can be
    stacked.
    """

    def __init__(self, text: bytes, length: int) -> None:
        if length < 1:
            raise DataError(
                f"Cannot divide a text into windows of {length} bytes.",
                "The length must be at least 1.",
                "Pass length=1.",
            )
        self.length = length
        self.bytes = len(text)
        self._text = torch.frombuffer(bytearray(b"\n" + text), dtype=torch.uint8)  # torch warns of read-only memory

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
