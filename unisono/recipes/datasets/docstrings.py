"""Docstrings of Python's standard library, labeled with topics. They come with Python: no download.

The module or package determines the topic: a docstring of `smtplib` is about mail.
"""

from __future__ import annotations

import ast
import hashlib
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from unisono import DataError
from unisono.recipes.datasets.held_out import keyed_hash

TOPICS = {
    "asynchrony": ("asyncio",),
    "imports": ("importlib", "modulefinder", "pkgutil", "runpy", "zipimport"),
    "language": ("ast", "collections", "dataclasses", "dis", "enum", "functools", "inspect", "tokenize", "typing"),
    "mail": ("email", "imaplib", "mailbox", "poplib", "smtplib"),
    "markup": ("html", "xml"),
    "numbers": ("_pydecimal", "calendar", "datetime", "fractions", "numbers", "random", "statistics"),
    "processes": ("concurrent", "multiprocessing", "queue", "subprocess", "threading"),
    "tests": ("doctest", "unittest"),
    "web": ("ftplib", "http", "socketserver", "urllib", "webbrowser", "wsgiref", "xmlrpc"),
    "windows": ("tkinter", "turtle"),
}
"""Topics and their modules and packages. Some systems install Python without tkinter."""

VALID_SHARE = 0.25
"""The largest fraction of a topic's texts for validation, in whole files."""

_HASH_KEY = "unisono: docstrings"

SHORTEST = 20
"""The least number of characters: a text like "Return self." has no topic."""

LabeledText = tuple[str, int]
"""A text and the index of its topic."""


@dataclass(frozen=True)
class Docstrings:
    """Texts for training and validation. All texts of a file are in one of the two."""

    topics: tuple[str, ...]
    train: list[LabeledText]
    valid: list[LabeledText]
    digest: str
    """The first 12 digits of the sha256 over all texts: equal digests, equal data."""

    @property
    def majority(self) -> float:
        """The validation accuracy of always predicting the most common topic of the training set."""
        labels = [label for _, label in self.train]
        majority = max(range(len(self.topics)), key=labels.count)
        return sum(label == majority for _, label in self.valid) / len(self.valid)

    def summary(self) -> str:
        """Return name, size, license and digest, in one line."""
        return (
            f"docstrings of Python {platform.python_version()}'s standard library: {len(self.topics)} topics, "
            f"{len(self.train):,} texts for training, {len(self.valid):,} of other files for validation, "
            f"license PSF, digest {self.digest}"
        )


def load_docstrings(folder: Path | None = None) -> Docstrings:
    """Load the docstrings of the standard library (or of `folder`) on one of TOPICS, without repeated texts.

    A hash of their paths chooses each topic's files for validation. A topic of fewer than two files is left out.

    Raises:
        DataError: There are fewer than two topics, or no texts for training or validation.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    files = {topic: [path for name in names for path in _files(folder, name)] for topic, names in TOPICS.items()}
    topics = tuple(topic for topic, paths in files.items() if len(paths) >= 2)
    if len(topics) < 2:
        raise DataError(
            "Cannot load docstrings: the source code of Python's standard library is missing.",
            f"{folder} has the source code of {len(topics)} of {len(TOPICS)} topics.",
            "Use a Python with its source code, from python.org, pyenv, conda or your system's packages.",
        )
    train: list[LabeledText] = []
    valid: list[LabeledText] = []
    digest, seen = hashlib.sha256(), set[str]()
    for label, topic in enumerate(topics):
        texts: dict[Path, list[str]] = {}
        for path in files[topic]:
            texts[path] = [text for text in dict.fromkeys(_texts(path)) if text not in seen]
            seen.update(texts[path])
        held = _held_out_files(texts, folder)
        for path in files[topic]:
            (valid if path in held else train).extend((text, label) for text in texts[path])
            if texts[path]:
                digest.update(f"{label} {path in held} {texts[path]}".encode(errors="backslashreplace"))
    if not train or not valid:
        raise DataError(
            f"Cannot train on the docstrings in {folder}: there are too few.",
            f"It has {len(train)} for training and {len(valid)} for validation.",
            "Use a Python whose source code has docstrings.",
        )
    return Docstrings(topics, train, valid, digest.hexdigest()[:12])


def _held_out_files(texts: dict[Path, list[str]], folder: Path) -> set[Path]:
    """Choose a topic's files for validation in the order of their hashes, skipping those that exceed VALID_SHARE."""
    remaining = VALID_SHARE * sum(map(len, texts.values()))
    held = set()
    for path in sorted(texts, key=lambda path: keyed_hash(path.relative_to(folder).as_posix(), _HASH_KEY)):
        if len(texts[path]) <= remaining:
            remaining -= len(texts[path])
            held.add(path)
    return held


def _files(folder: Path, name: str) -> Iterator[Path]:
    """Yield the module's file, or the package's files without its tests, sorted."""
    if (folder / f"{name}.py").is_file():
        yield folder / f"{name}.py"
    for path in sorted((folder / name).rglob("*.py")):
        if not {"test", "tests", "idle_test"} & set(path.relative_to(folder).parts):
            yield path


def _texts(path: Path) -> Iterator[str]:
    """Yield the docstrings of a file that are long enough; none if this Python cannot parse it."""
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if len(text) >= SHORTEST:
                yield text
