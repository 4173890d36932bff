"""Load Python's source code: the same on all machines with one version of Python, each byte once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono import DataError
from unisono.recipes.datasets.python_source import IGNORED, ByteWindows, load_python_source


def library(folder: Path, files: int = 200) -> Path:
    """Write a library of Python files."""
    for i in range(files):
        path = folder / f"package{i % 7}" / f"file{i}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# file {i}\n" * (i + 1))
    return folder


def test_standard_library_is_loaded() -> None:
    corpus = load_python_source()
    assert len(corpus.train) > 5_000_000
    assert 0.01 < len(corpus.valid) / len(corpus.train) < 0.15
    assert "PSF" in corpus.summary()
    assert "\n" not in corpus.summary()
    assert b"class TestCase(object):" in corpus.train + corpus.valid  # unittest is part of the library
    assert b"class LongReprTest(unittest.TestCase)" not in corpus.train + corpus.valid  # its tests are not


def test_corpus_depends_on_contents_and_not_on_the_folder(tmp_path: Path) -> None:
    here = library(tmp_path / "here")
    there = tmp_path / "quite" / "elsewhere"
    shutil.copytree(here, there)
    assert load_python_source(here) == load_python_source(there)
    (there / "package0" / "file0.py").write_text("# another file 0\n")
    assert load_python_source(here).digest != load_python_source(there).digest


def test_each_file_is_in_one_part_and_new_files_move_no_others(tmp_path: Path) -> None:
    folder = library(tmp_path)
    before = load_python_source(folder)
    texts = [path.read_bytes() for path in folder.rglob("*.py")]
    assert all((text in before.train) != (text in before.valid) or len(text) < 40 for text in texts)
    assert len(before.train) + len(before.valid) == sum(map(len, texts))
    (folder / "new.py").write_text("# new\n")
    after = load_python_source(folder)
    assert after.files == before.files + 1
    assert after.valid.replace(b"# new\n", b"") == before.valid
    assert after.train.replace(b"# new\n", b"") == before.train


def test_files_of_the_machine_are_skipped(tmp_path: Path) -> None:
    folder = library(tmp_path)
    before = load_python_source(folder)
    for name in ("test/test_os.py", "site-packages/torch.py", "config-3.11-x86_64/made.py", "_sysconfigdata__linux.py"):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x = 1\n")
    assert load_python_source(folder) == before


def test_missing_source_code_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has 0 \.py files"):
        load_python_source(tmp_path)


@given(text=st.binary(max_size=200), length=st.integers(1, 70))
def test_each_byte_is_a_target_exactly_once(text: bytes, length: int) -> None:
    windows = ByteWindows(text, length)
    targets: list[int] = []
    previous: list[int] = []
    for i in range(len(windows)):
        tokens, window_targets = windows[i]
        assert tokens.shape == window_targets.shape == (length,)
        mask = window_targets != IGNORED
        targets += window_targets[mask].tolist()
        previous += tokens[mask].tolist()
    assert bytes(targets) == text
    assert bytes(previous) == (b"\n" + text)[: len(text)]


def test_last_window_is_padded() -> None:
    windows = ByteWindows(b"abcdefg", 3)
    assert len(windows) == 3
    assert windows[2][1].tolist() == [ord("g"), IGNORED, IGNORED]
    with pytest.raises(IndexError):
        windows[3]
    with pytest.raises(DataError, match="windows of 0 bytes"):
        ByteWindows(b"abc", 0)
