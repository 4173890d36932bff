"""A rank's log keeps every line except those that were overwritten, however the output is cut."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.launcher.rank_log import LONGEST_LINE, RankLog, last_lines

PIECES = st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r", b"\r\n", b"\x1b[2K\r"]), max_size=30)


def kept(data: bytes) -> bytes:
    """Compute the expected log in a simple, slow way."""
    out = line = b""
    data = data.replace(b"\r\n", b"\x00")
    for byte in (data[i : i + 1] for i in range(len(data))):
        if byte == b"\r":
            line = b""
        elif byte in (b"\n", b"\x00"):
            out, line = out + line + (b"\n" if byte == b"\n" else b"\r\n"), b""
        else:
            line += byte
    return out + line + (b"\n" if line else b"")


@given(PIECES, st.lists(st.integers(0, 60), max_size=10))
def test_the_log_does_not_depend_on_how_output_is_cut(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes], cuts: list[int]
) -> None:
    data = b"".join(pieces)
    path = tmp_path_factory.getbasetemp() / "rank-0.log"
    path.unlink(missing_ok=True)
    log = RankLog(path)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for begin, end in pairwise(edges):
        log.write(data[begin:end])
    log.close()
    assert path.read_bytes() == kept(data)


def test_a_second_run_is_appended(tmp_path: Path) -> None:
    for text in (b"first\n", b"second\n"):
        log = RankLog(tmp_path / "log" / "rank-0.log")
        log.write(text)
        log.close()
    assert (tmp_path / "log" / "rank-0.log").read_bytes() == b"first\nsecond\n"


def test_an_endless_line_does_not_fill_the_memory(tmp_path: Path) -> None:
    log = RankLog(tmp_path / "rank-0.log")
    log.write(b"x" * (LONGEST_LINE + 1))
    assert (tmp_path / "rank-0.log").stat().st_size == LONGEST_LINE + 1
    log.close()


@pytest.mark.parametrize("full", [["rank-0.log"], ["rank-0.times"], ["rank-0.log", "rank-0.times"]])
def test_a_full_disk_ends_the_log_and_not_the_run(tmp_path: Path, full: list[str]) -> None:
    for name in full:
        (tmp_path / name).symlink_to("/dev/full")
    log = RankLog(tmp_path / "rank-0.log")
    log.write(b"a line\n")
    assert (log.error is not None) == ("rank-0.log" in full)
    log.write(b"another\n")
    log.close("ended 0")


def test_last_lines_skips_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    path.write_bytes(b"one\n\ntwo \xff\n   \nthree\n")
    assert last_lines(path, 2) == ["two \N{REPLACEMENT CHARACTER}", "three"]
    assert last_lines(tmp_path / "none", 2) == []
