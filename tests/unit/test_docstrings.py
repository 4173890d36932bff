"""The corpus of the topics recipe: every text once, every file on one side."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from unisono import DataError
from unisono.recipes.datasets.docstrings import docstrings


def library(folder: Path) -> Path:
    """Two topics in five files each, and a topic in one file only."""
    for package in ("email", "asyncio"):
        for i in range(5):
            path = folder / package / f"file{i}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            texts = [f'def f{j}():\n    """What {package} has in {path.name}, number {j}."""\n' for j in range(4)]
            path.write_text("".join(texts) + 'def g():\n    """Short."""\n')
    (folder / "unittest.py").write_text('"""One file is too little for two parts."""\n')
    return folder


def test_the_standard_library_has_topics() -> None:
    corpus = docstrings()
    assert len(corpus.topics) >= 9
    assert len(corpus.train) > 2000
    assert 0.1 < len(corpus.valid) / len(corpus.train) < 0.4
    assert corpus.majority < 0.3
    assert "licence PSF" in corpus.line()
    texts = [text for text, _ in corpus.train + corpus.valid]
    assert len(set(texts)) == len(texts)
    assert (
        {label for _, label in corpus.valid} == {label for _, label in corpus.train} == set(range(len(corpus.topics)))
    )


def test_a_file_is_wholly_in_one_part_wherever_it_lies(tmp_path: Path) -> None:
    here = library(tmp_path / "here")
    corpus = docstrings(here)
    assert corpus.topics == ("asynchrony", "mail")
    assert (len(corpus.train), len(corpus.valid)) == (32, 8)
    files = [{text.partition(",")[0] for text, _ in part} for part in (corpus.train, corpus.valid)]
    assert files[0] & files[1] == set()
    shutil.copytree(here, tmp_path / "there")
    assert docstrings(tmp_path / "there") == corpus
    (tmp_path / "there" / "email" / "file0.py").write_text('"""Something else altogether."""\n')
    assert docstrings(tmp_path / "there").digest != corpus.digest


def test_what_cannot_be_parsed_or_is_a_test_is_passed_over(tmp_path: Path) -> None:
    corpus = docstrings(library(tmp_path))
    (tmp_path / "email" / "old.py").write_text("print 'so it was'\n")
    (tmp_path / "email" / "test").mkdir()
    (tmp_path / "email" / "test" / "test_mail.py").write_text('"""A test, and not the library."""\n')
    assert docstrings(tmp_path) == corpus


def test_a_python_without_source_or_docstrings_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has the source code of 0 of 10 topics"):
        docstrings(tmp_path)
    for path in library(tmp_path).rglob("*.py"):
        path.write_text("x = 1\n")
    with pytest.raises(DataError, match="There are 0 to train on"):
        docstrings(tmp_path)
