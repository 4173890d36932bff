"""Load docstrings with topics: no repeated text, each file in one part."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from unisono import DataError
from unisono.recipes.datasets.docstrings import load_docstrings


def library(folder: Path) -> Path:
    """Write a library with two topics of five files each, and a topic of one file."""
    for package in ("email", "asyncio"):
        for i in range(5):
            path = folder / package / f"file{i}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            texts = [f'def f{j}():\n    """Text of {package} in {path.name}, number {j}."""\n' for j in range(4)]
            path.write_text("".join(texts) + 'def g():\n    """Short."""\n')
    (folder / "unittest.py").write_text('"""One file cannot be split into two parts."""\n')
    return folder


def test_standard_library_has_topics() -> None:
    corpus = load_docstrings()
    assert len(corpus.topics) >= 9
    assert len(corpus.train) > 2000
    assert 0.1 < len(corpus.valid) / len(corpus.train) < 0.4
    assert corpus.majority < 0.3
    assert "license PSF" in corpus.summary()
    texts = [text for text, _ in corpus.train + corpus.valid]
    assert len(set(texts)) == len(texts)
    assert (
        {label for _, label in corpus.valid} == {label for _, label in corpus.train} == set(range(len(corpus.topics)))
    )


def test_each_file_is_in_one_part_in_any_folder(tmp_path: Path) -> None:
    here = library(tmp_path / "here")
    corpus = load_docstrings(here)
    assert corpus.topics == ("asynchrony", "mail")
    assert (len(corpus.train), len(corpus.valid)) == (32, 8)
    files = [{text.partition(",")[0] for text, _ in part} for part in (corpus.train, corpus.valid)]
    assert files[0] & files[1] == set()
    shutil.copytree(here, tmp_path / "there")
    assert load_docstrings(tmp_path / "there") == corpus
    (tmp_path / "there" / "email" / "file0.py").write_text('"""Something else altogether."""\n')
    assert load_docstrings(tmp_path / "there").digest != corpus.digest


def test_tests_and_files_of_python_2_are_skipped(tmp_path: Path) -> None:
    corpus = load_docstrings(library(tmp_path))
    (tmp_path / "email" / "old.py").write_text("print 'text'\n")
    (tmp_path / "email" / "test").mkdir()
    (tmp_path / "email" / "test" / "test_mail.py").write_text('"""A test, and not the library."""\n')
    assert load_docstrings(tmp_path) == corpus


def test_missing_source_code_or_docstrings_are_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has the source code of 0 of 10 topics"):
        load_docstrings(tmp_path)
    for path in library(tmp_path).rglob("*.py"):
        path.write_text("x = 1\n")
    with pytest.raises(DataError, match="It has 0 for training"):
        load_docstrings(tmp_path)
