"""Streams: every format at every address, damaged shards, and that only needed samples are read."""

from __future__ import annotations

import logging
import pickle
import re
import shutil
import sqlite3
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest
from torch.utils.data import IterableDataset

from tests.house.sources import ROOT
from tests.shards import COUNTS, write_lines, write_tars
from unisono.data.streaming import files, jsonl, tar
from unisono.data.streaming.files import DamagedSample, expand
from unisono.data.streaming.sample_offsets import LineOffsets
from unisono.data.streaming.stream import ForwardReader, Stream
from unisono.distributed.init import join_process_group as join
from unisono.environment import World
from unisono.errors import DataError

FORMATS: dict[str, Callable[[Path], Stream]] = {
    "tar": lambda folder: Stream.tar(write_tars(folder)),
    "packed tar": lambda folder: Stream.tar(write_tars(folder, packed=True)),
    "lines": lambda folder: Stream.json_lines(write_lines(folder)),
    "packed lines": lambda folder: Stream.json_lines(write_lines(folder, packed=True)),
}
LENGTH = sum(COUNTS)


def numbers(samples: list[Any]) -> list[int]:
    return [sample["cls"] for sample in samples]


@pytest.mark.parametrize("form", FORMATS)
def test_every_address_can_be_read_in_any_order(tmp_path: Path, form: str) -> None:
    stream = FORMATS[form](tmp_path)
    assert len(stream) == LENGTH
    assert stream.counts == COUNTS
    assert [stream.address(i) for i in (0, 6, 7, 19, 20, 24)] == [(0, 0), (0, 6), (2, 0), (2, 12), (3, 0), (3, 4)]
    assert numbers(stream.__getitems__(list(range(LENGTH)))) == list(range(LENGTH))
    assert numbers(stream.__getitems__([24, 0, 19, 3, 3, 7])) == [24, 0, 19, 3, 3, 7]
    assert stream[8]["txt"] == "ü" * 8
    with pytest.raises(IndexError):
        stream[LENGTH]
    copy = pickle.loads(pickle.dumps(stream))  # to a worker that is spawned
    assert copy[LENGTH - 1]["cls"] == LENGTH - 1
    assert FORMATS[form](tmp_path / "again").shape == stream.shape


def test_members_of_a_tar_are_decoded_by_extension(tmp_path: Path) -> None:
    sample = Stream.tar(write_tars(tmp_path))[2]
    assert sample == {"__key__": "a.dir/00002", "cls": 2, "txt": "üü", "more.json": {"half": 1.0}}


def test_shards_in_any_fsspec_file_system(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    folder = f"/{tmp_path.name}"
    write_lines(tmp_path)
    for path in tmp_path.glob("*.jsonl"):
        memory.pipe(f"{folder}/{path.name}", path.read_bytes())
    try:
        stream = Stream.json_lines(f"memory://{folder}/part-*.jsonl")
        assert list(stream.shards.names) == [f"memory://{folder}/part-{i}.jsonl" for i in range(4)]
        assert numbers(stream.__getitems__([3, 20])) == [3, 20]
    finally:
        memory.rm(folder, recursive=True)


def test_patterns(tmp_path: Path) -> None:
    for name in ("a-00.tar", "a-01.tar", "b-00.tar"):
        (tmp_path / name).touch()
    here = str(tmp_path)
    assert expand(f"{here}/{{a,b}}-{{00..01}}.tar") == [f"{here}/{x}-0{i}.tar" for x in "ab" for i in (0, 1)]
    assert expand(f"{here}/{{b,a}}-*.tar") == [f"{here}/b-00.tar", f"{here}/a-00.tar", f"{here}/a-01.tar"]
    assert expand([tmp_path / "b-00.tar", f"{here}/a*"]) == [f"{here}/{x}.tar" for x in ("b-00", "a-00", "a-01")]
    with pytest.raises(DataError, match=r"No file matches .*c\*\.tar"):
        expand(f"{here}/c*.tar")
    with pytest.raises(DataError, match="at least one shard"):
        Stream.tar([])
    assert expand([f"{here}/a{{b.tar", f"{here}/{{x}}.tar"]) == [f"{here}/a{{b.tar", f"{here}/{{x}}.tar"]
    with pytest.raises(DataError, match="FileNotFoundError"):
        len(Stream.tar(f"{here}/nothing.tar"))


def test_an_index_is_kept_until_its_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = write_lines(tmp_path, (3,))
    scanned: list[str] = []
    scan = jsonl.LineReader._scan

    def counted_scan(lines: jsonl.LineReader) -> LineOffsets:
        scanned.append("")
        return scan(lines)

    monkeypatch.setattr(jsonl.LineReader, "_scan", counted_scan)
    for _ in range(3):
        assert len(Stream.json_lines(pattern)) == 3
    assert len(scanned) == 1
    write_lines(tmp_path, (4,))
    assert len(Stream.json_lines(pattern)) == 4
    monkeypatch.setattr(files, "_index_path", lambda url: Path("/proc/nowhere/x.json"))  # not writable: no error
    assert len(Stream.json_lines(pattern)) == 4


def test_known_counts_are_not_counted_again(tmp_path: Path) -> None:
    pattern = write_lines(tmp_path, packed=True)
    stream = Stream.json_lines(pattern, counts=COUNTS)
    shutil.rmtree(tmp_path)
    assert len(stream) == LENGTH


# -- damaged shards


def cut(path: Path, size: int) -> Path:
    path.write_bytes(path.read_bytes()[:size])
    return path


def damage_tar(folder: Path, member: int, at: int, to: bytes | None) -> Path:
    """Write the third shard, cut `at` bytes behind the beginning of a member, or with the bytes `to` there."""
    write_tars(folder)
    path = folder / "part-2.tar"
    with tarfile.open(path) as archive:
        at += archive.getmembers()[member].offset
    content = path.read_bytes()
    path.write_bytes(content[:at] + (b"" if to is None else to + content[at + len(to) :]))
    return path


def stop(stream: Stream) -> str:
    with join(World()) as group:
        try:
            stream.prepare(group, "stop")
            stream.__getitems__(list(range(len(stream))))
        except DataError as error:
            return str(error)
    pytest.fail("no damage was found")


def skip(stream: Stream) -> list[int]:
    with join(World()) as group:
        stream.prepare(group, "skip")
        return numbers(stream.__getitems__(list(range(len(stream)))))


@pytest.mark.parametrize(
    ("member", "at", "to", "whole", "problem"),
    [
        (15, 100, None, 4, "There is no tar header at byte"),  # at the sixth sample: the fifth may be incomplete
        (13, 512 + 2, None, 4, "unexpected end of data"),
        (15, 0, None, 4, r"The file ends at byte"),
        (14, 0, None, 4, r"The file ends at byte"),
        (20, 0, b"x" * 512, 6, "There is no tar header at byte"),
        (0, 0, b"x" * 512, 0, "ReadError"),
    ],
    ids=["a header", "content", "between samples", "between members", "garbage", "no tar"],
)
def test_a_damaged_tar_is_named_with_its_offset(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, member: int, at: int, to: bytes | None, whole: int, problem: str
) -> None:
    path = damage_tar(tmp_path, member, at, to)
    pattern = str(tmp_path / "part-{0..3}.tar")
    message = stop(Stream.tar(pattern))
    expected = f"Sample {whole} of the shard {path} is damaged.\n  {problem}"
    assert expected in message.replace("ReadError: unexpected", "unexpected")
    assert "--set loader.on_error=skip" in message
    with caplog.at_level(logging.WARNING):
        assert skip(Stream.tar(pattern)) == [*range(7), *range(7, 7 + whole), *range(20, 25)]
    assert f"Skipped sample {whole} of {path}: " in caplog.text


def test_a_damaged_line_is_named_and_can_be_skipped(tmp_path: Path) -> None:
    pattern = write_lines(tmp_path)
    path = tmp_path / "part-2.jsonl"
    path.write_text(path.read_text().replace('"cls": 9,', '"cls": 9'))
    message = stop(Stream.json_lines(pattern))
    assert f"Sample 2 of the shard {path} is damaged.\n  JSONDecodeError" in message
    assert skip(Stream.json_lines(pattern)) == [i for i in range(LENGTH) if i != 9]


@pytest.mark.parametrize("form", ["packed tar", "packed lines"])
def test_a_compressed_shard_that_breaks_off(tmp_path: Path, form: str) -> None:
    FORMATS[form](tmp_path)
    (path,) = tmp_path.glob("part-2.*")
    cut(path, path.stat().st_size * 2 // 3)
    stream = Stream.tar if "tar" in form else Stream.json_lines
    assert f"of the shard {path} is damaged." in stop(stream(str(tmp_path / "part-*")))
    kept = skip(stream(str(tmp_path / "part-*")))
    assert kept == [i for i in range(LENGTH) if i in kept]
    assert {*range(7), *range(20, 25)} <= {*kept} < {*range(LENGTH)}


def test_a_shard_that_shrank_after_it_was_counted(tmp_path: Path) -> None:
    for form in FORMATS:
        stream = FORMATS[form](tmp_path / form)
        assert len(stream) == LENGTH
        (path,) = (tmp_path / form).glob("part-3.*")
        cut(path, 200 if "packed" not in form else 40)
        with pytest.raises(DataError, match=r"of the shard .*part-3.* is damaged"):
            stream.__getitems__([20, 21, 22, 23, 24])


def test_a_micro_batch_of_damaged_samples_only(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("1\n2\nno\nnor this\n")
    stream = Stream.json_lines(tmp_path / "x.jsonl")
    with join(World()) as group:
        stream.prepare(group, "skip")
    assert stream.__getitems__([0, 2]) == [1]
    with pytest.raises(DataError, match="All 2 samples of a micro-batch are damaged"):
        stream.__getitems__([2, 3])


def test_an_error_of_map_is_raised_unchanged(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("1\n0\n2\n")
    stream = Stream.json_lines(tmp_path / "x.jsonl", map=lambda x: 1 / x)
    with pytest.raises(ZeroDivisionError) as caught:
        stream.__getitems__([0, 1])
    assert caught.value.__notes__ == [f"while mapping sample 1 of {tmp_path}/x.jsonl"]
    with join(World()) as group:
        stream.prepare(group, "skip")
    assert stream.__getitems__([0, 1, 2]) == [1.0, 0.5]


# -- reads


class CountedShards:
    """Shards of numbers that count how far they were read."""

    names = ("a", "b")

    def __init__(self) -> None:
        self.begun = self.read = 0

    def open(self, shard: int) -> CountedShards:
        return self

    def decode(self, raw: int) -> int:
        return raw

    def __iter__(self) -> Iterator[int]:
        self.begun += 1
        for i in range(100):
            self.read += 1
            yield i


def test_a_forward_reader_reads_a_shard_once_within_a_window() -> None:
    shards = CountedShards()
    stream = Stream(shards, window=10, counts=(100, 100))
    read = [stream[i] for i in (0, 9, 3, 50, 45, 41, 99)]
    assert read == [0, 9, 3, 50, 45, 41, 99]
    assert (shards.begun, shards.read) == (1, 100)
    assert stream[12] == 12  # further back than the window
    assert (shards.begun, shards.read) == (2, 113)
    with pytest.raises(DamagedSample, match="longer when it was counted"):
        ForwardReader(CountedShards(), 3)[100]


class Rows(IterableDataset[int]):
    """A common data set; torch gives it a __getitem__ that only raises."""

    def __init__(self, shard: int) -> None:
        self.shard = shard

    def __iter__(self) -> Iterator[int]:
        return iter(range(10 * self.shard, 10 * self.shard + 5 + self.shard))


class Shelves:
    names = ("a", "b", "c")
    open = staticmethod(Rows)

    @staticmethod
    def decode(raw: int) -> int:
        return raw


def test_a_shard_may_be_torchs_iterable_data_set() -> None:
    stream = Stream(Shelves(), window=4)
    assert len(stream) == 5 + 6 + 7
    assert stream.__getitems__([0, 4, 5, 10, 17]) == [0, 4, 10, 15, 26]


def test_an_object_without_shards_is_refused() -> None:
    with pytest.raises(DataError, match=r"of Rows\.\n  It lacks names and open and decode.*\n.*Stream.tar"):
        Stream(Rows(0))  # type: ignore[arg-type]


def test_an_uncompressed_tar_is_not_scanned_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream.tar(write_tars(tmp_path))
    assert len(stream) == LENGTH
    monkeypatch.setattr(tar.TarReader, "_scan", None)  # the index is cached since the counting
    assert stream[19]["cls"] == 19


def test_the_pages_own_shards(tmp_path: Path) -> None:
    """docs/guide/streams.md shows how to write shards."""
    page = (ROOT / "docs" / "guide" / "streams.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(import sqlite3.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    with sqlite3.connect(tmp_path / "db") as db:
        for table, rows in (("a", 3), ("b", 2)):
            db.execute(f"create table {table} (x)")
            db.executemany(f"insert into {table} values (?)", [(f"{table}{i}",) for i in range(rows)])
    db.close()
    stream = names["stream"](str(tmp_path / "db"))
    assert stream.__getitems__([4, 0, 2]) == [("b1",), ("a0",), ("a2",)]
