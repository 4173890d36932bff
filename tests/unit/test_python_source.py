"""The corpus of the text recipe: the same on every machine with the same Python, every byte once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono import DataError
from unisono.recipes.datasets.python_source import IGNORED, ByteWindows, python_source


def library(folder: Path, files: int = 200) -> Path:
    for i in range(files):
        path = folder / f"room{i % 7}" / f"file{i}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# file {i}\n" * (i + 1))
    return folder


def test_the_standard_library_is_there() -> None:
    corpus = python_source()
    assert len(corpus.train) > 5_000_000
    assert 0.01 < len(corpus.valid) / len(corpus.train) < 0.15
    assert "PSF" in corpus.line()
    assert "\n" not in corpus.line()
    assert b"class TestCase(object):" in corpus.train + corpus.valid  # unittest is library
    assert b"class LongReprTest(unittest.TestCase)" not in corpus.train + corpus.valid  # its tests are not


def test_it_depends_on_contents_and_not_on_where_they_lie(tmp_path: Path) -> None:
    here = library(tmp_path / "here")
    there = tmp_path / "quite" / "elsewhere"
    shutil.copytree(here, there)
    assert python_source(here) == python_source(there)
    (there / "room0" / "file0.py").write_text("# another file 0\n")
    assert python_source(here).digest != python_source(there).digest


def test_a_file_is_wholly_in_one_part_and_new_files_move_no_other(tmp_path: Path) -> None:
    folder = library(tmp_path)
    before = python_source(folder)
    texts = [path.read_bytes() for path in folder.rglob("*.py")]
    assert all((text in before.train) != (text in before.valid) or len(text) < 40 for text in texts)
    assert len(before.train) + len(before.valid) == sum(map(len, texts))
    (folder / "new.py").write_text("# new\n")
    after = python_source(folder)
    assert after.files == before.files + 1
    assert after.valid.replace(b"# new\n", b"") == before.valid
    assert after.train.replace(b"# new\n", b"") == before.train


def test_what_belongs_to_the_machine_stays_out(tmp_path: Path) -> None:
    folder = library(tmp_path)
    before = python_source(folder)
    for name in ("test/test_os.py", "site-packages/torch.py", "config-3.11-x86_64/made.py", "_sysconfigdata__linux.py"):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x = 1\n")
    assert python_source(folder) == before


def test_a_python_without_its_source_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has 0 \.py files"):
        python_source(tmp_path)


@given(text=st.binary(max_size=200), length=st.integers(1, 70))
def test_every_byte_is_a_target_exactly_once(text: bytes, length: int) -> None:
    windows = ByteWindows(text, length)
    targets: list[int] = []
    before: list[int] = []
    for i in range(len(windows)):
        tokens, wanted = windows[i]
        assert tokens.shape == wanted.shape == (length,)
        counts = wanted != IGNORED
        targets += wanted[counts].tolist()
        before += tokens[counts].tolist()
    assert bytes(targets) == text
    assert bytes(before) == (b"\n" + text)[: len(text)]


def test_windows_end_where_the_text_ends() -> None:
    windows = ByteWindows(b"abcdefg", 3)
    assert len(windows) == 3
    assert windows[2][1].tolist() == [ord("g"), IGNORED, IGNORED]
    with pytest.raises(IndexError):
        windows[3]
    with pytest.raises(DataError, match="length is 0"):
        ByteWindows(b"abc", 0)
