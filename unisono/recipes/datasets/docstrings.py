"""Short texts with a topic each, and no download: docstrings of Python's standard library.

It lies beside every Python. What a text is about is where it stands: a docstring of `smtplib` is about mail.
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
"""Topics, and the modules and packages that are about them. Some systems ship Python without its windows."""

VALID_SHARE = 0.25
"""The most that is kept of a topic's texts for validation, in whole files."""

SHORTEST = 20
"""Characters: "Return self." is about nothing."""

Text = tuple[str, int]
"""A text, and the number of its topic."""


@dataclass(frozen=True)
class Docstrings:
    """Texts in two parts. A file is wholly in one of them."""

    topics: tuple[str, ...]
    train: list[Text]
    valid: list[Text]
    digest: str
    """The first 12 digits of the sha256 over all texts: equal digests, equal data."""

    @property
    def majority(self) -> float:
        """The share of the validation that one gets right who always says the commonest topic of the training."""
        labels = [label for _, label in self.train]
        commonest = max(range(len(self.topics)), key=labels.count)
        return sum(label == commonest for _, label in self.valid) / len(self.valid)

    def line(self) -> str:
        """What the data is, how much, under which licence: one line."""
        return (
            f"docstrings of Python {platform.python_version()}'s standard library: {len(self.topics)} topics, "
            f"{len(self.train):,} texts to train on, {len(self.valid):,} from other files to validate on, "
            f"licence PSF, digest {self.digest}"
        )


def docstrings(folder: Path | None = None) -> Docstrings:
    """The docstrings of the standard library (or of `folder`) that belong to one of TOPICS; a text is there once.

    Of each topic, a keyed hash of their paths chooses the files to validate on. A topic of fewer than two files is left
    out. Raises DataError when that leaves fewer than two topics, or nothing to validate on.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    files = {topic: [path for name in names for path in _files(folder, name)] for topic, names in TOPICS.items()}
    topics = tuple(topic for topic, paths in files.items() if len(paths) >= 2)
    if len(topics) < 2:
        raise DataError(
            "The topics recipe was asked to train on the docstrings of Python's standard library.",
            f"{folder} has the source code of {len(topics)} of {len(TOPICS)} topics.",
            "Run it with a Python that has its source, from python.org, pyenv, conda or your system's packages.",
        )
    train: list[Text] = []
    valid: list[Text] = []
    digest, seen = hashlib.sha256(), set[str]()
    for label, topic in enumerate(topics):
        texts = {}
        for path in files[topic]:
            texts[path] = [text for text in dict.fromkeys(_texts(path)) if text not in seen]
            seen.update(texts[path])
        held = _held(texts, folder)
        for path in files[topic]:
            (valid if path in held else train).extend((text, label) for text in texts[path])
            if texts[path]:
                digest.update(f"{label} {path in held} {texts[path]}".encode(errors="backslashreplace"))
    if not train or not valid:
        raise DataError(
            f"The topics recipe was asked to train on the docstrings below {folder}.",
            f"There are {len(train)} to train on and {len(valid)} to validate on.",
            "Run it with a Python that has its source with docstrings, not compiled with -OO.",
        )
    return Docstrings(topics, train, valid, digest.hexdigest()[:12])


def _held(texts: dict[Path, list[str]], folder: Path) -> set[Path]:
    """The files of a topic to validate on: one after another by their hash, passing over those that are too large."""
    room = VALID_SHARE * sum(map(len, texts.values()))
    held = set()
    for path in sorted(texts, key=lambda path: _key(path.relative_to(folder).as_posix())):
        if len(texts[path]) <= room:
            room -= len(texts[path])
            held.add(path)
    return held


def _files(folder: Path, name: str) -> Iterator[Path]:
    """The module's file, or the package's files without its tests, sorted."""
    if (folder / f"{name}.py").is_file():
        yield folder / f"{name}.py"
    for path in sorted((folder / name).rglob("*.py")):
        if not {"test", "tests", "idle_test"} & set(path.relative_to(folder).parts):
            yield path


def _texts(path: Path) -> Iterator[str]:
    """The docstrings of a file that are long enough, in the order of `ast.walk`; none if it is no Python of today."""
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if len(text) >= SHORTEST:
                yield text


def _key(path: str) -> bytes:
    """A number that depends on `path` alone; the key makes the split this recipe's own."""
    return hashlib.blake2b(path.encode(), digest_size=8, key=b"unisono: docstrings").digest()
