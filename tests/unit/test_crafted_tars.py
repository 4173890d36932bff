"""Crafted shards: each sample that is returned is right, and the rest is damage that the message names."""

from __future__ import annotations

import gzip
import io
import os
import random
import resource
import tarfile
from pathlib import Path
from typing import Any

import pytest

from unisono.data.streaming.stream import Stream
from unisono.errors import DataError

BLOCK = tarfile.BLOCKSIZE


def header(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE, **more: Any) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    for key, value in more.items():
        setattr(info, key, value)
    return info.tobuf(tarfile.GNU_FORMAT)


def member(name: str, content: bytes, kind: bytes = tarfile.REGTYPE) -> bytes:
    return header(name, len(content), kind) + content + bytes(-len(content) % BLOCK)


def signed(block: bytes) -> bytes:
    """Return a header with the checksum of its content."""
    blank = block[:148] + b" " * 8 + block[156:]
    return blank[:148] + b"%06o\0 " % sum(blank) + blank[156:]


def with_size(field: bytes) -> bytes:
    """Return a header whose field for the size holds these bytes."""
    block = header("b.cls", 1)
    return signed(block[:124] + field.ljust(12, b"\0") + block[136:])


def pax(**records: str) -> bytes:
    """Return an extended header with these records."""
    text = b""
    for key, value in records.items():
        line = f" {key.replace('_', '.')}={value}\n".encode()
        size = len(line) + 1
        while len(str(size)) + len(line) != size:
            size += 1
        text += str(size).encode() + line
    return member("pax", text, tarfile.XHDTYPE)


GOOD = member("a.cls", b"1")
NEXT = member("c.cls", b"3")
END = bytes(2 * BLOCK)
LINKS = {
    "a link": tarfile.SYMTYPE,
    "a hard link": tarfile.LNKTYPE,
    "a device": tarfile.CHRTYPE,
    "a disk": tarfile.BLKTYPE,
    "a FIFO": tarfile.FIFOTYPE,
    "a folder": tarfile.DIRTYPE,
}

SKIPPED = {name: header("b.cls", 0, kind, linkname="/etc/passwd") for name, kind in LINKS.items()}
"""Members that are no files: the samples around them are read."""

PATHS = {name: member(name, b"2") for name in ("../../b.cls", "/etc/b.cls", "a/../../b.cls", "C:\\b.cls")}
"""Names that are paths: they become keys."""

DAMAGED = {
    "a negative size": with_size(b"\xff" * 11 + b"\x00"),
    "a negative size of one block": with_size((-1024).to_bytes(12, "big", signed=True)),
    "8 GiB": with_size(b"77777777777\0"),
    "2**62 bytes": with_size(b"\x80" + (2**62).to_bytes(11, "big")),
    "no number": with_size(b"xyz"),
    "a sparse file": header("b.cls", 0, tarfile.GNUTYPE_SPARSE),
    "a sparse file of 1 TiB": pax(GNU_sparse_size=str(2**40), GNU_sparse_map="0,1", GNU_sparse_name="b.cls")
    + member("b.cls", b"2"),
    "a sparse file of version 1": pax(GNU_sparse_major="1", GNU_sparse_minor="0", GNU_sparse_realsize=str(2**40))
    + member("b.cls", b"1\n0\n1\n".ljust(BLOCK, b"\0") + b"2"),
    "a pax size of -1": pax(size="-1") + member("b.cls", b"2"),
    "a pax size of 2**62": pax(size=str(2**62)) + member("b.cls", b"2"),
    "a pax header of 4 GiB": header("pax", 2**32, tarfile.XHDTYPE),
    "a pax header of 2 MiB": member("pax", b"9 a=bcdef\n" * 200_000, tarfile.XHDTYPE),
    "a long name of 4 GiB": header("name", 2**32, tarfile.GNUTYPE_LONGNAME),
    "3,000 long names": member("name", b"x" * 100, tarfile.GNUTYPE_LONGNAME) * 3000,
    "a wrong checksum": b"\1" + header("b.cls", 1)[1:],
    "half a header": header("b.cls", 1)[:200],
    "half a member": header("b.cls", 5000) + b"2" * 100,
    "no header": os.urandom(BLOCK),
}
"""What breaks an archive off: the sample before it is read, and the message names the damage."""


def write(folder: Path, content: bytes, *, packed: bool) -> Path:
    path = folder / ("shard.tar.gz" if packed else "shard.tar")
    path.write_bytes(gzip.compress(content) if packed else content)
    return path


def read(path: Path, skip: bool) -> list[Any]:
    """Return the numbers of all samples that can be read."""
    stream = Stream.tar(path, window=1)
    stream._skip_damaged = skip
    return [sample["cls"] for number in range(len(stream)) for sample in stream.__getitems__([number])]


@pytest.fixture(autouse=True)
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_members_that_are_no_files_are_skipped(tmp_path: Path, packed: bool) -> None:
    for name, block in SKIPPED.items():
        path = write(tmp_path, GOOD + block + NEXT + END, packed=packed)
        assert read(path, skip=False) == [1, 3], name
        path.unlink()


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_names_that_are_paths_leave_no_trace(tmp_path: Path, packed: bool) -> None:
    inner = tmp_path / "one" / "two"
    inner.mkdir(parents=True)
    for name, block in PATHS.items():
        path = write(inner, GOOD + block + NEXT + END, packed=packed)
        assert read(path, skip=False) == [1, 2, 3], name
        path.unlink()
    assert sorted(p.name for p in tmp_path.rglob("*") if "cache" not in p.parts) == ["one", "two"]


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("damage", DAMAGED)
def test_damage_is_named_and_what_is_before_it_is_read(tmp_path: Path, damage: str, packed: bool) -> None:
    content = GOOD + member("a.txt", b"x") + NEXT + DAMAGED[damage]
    content += b"" if damage.startswith("half") else NEXT + END
    path = write(tmp_path, content, packed=packed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=r"Sample \d+ of the shard .* is damaged"):
        read(path, skip=False)
    assert read(path, skip=True) in ([1], [1, 3])  # the last sample before the damage may lack members
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_a_tar_without_an_end_was_cut_off(tmp_path: Path, packed: bool) -> None:
    path = write(tmp_path, GOOD + NEXT, packed=packed)
    with pytest.raises(DataError, match=r"(?s)Sample 1 of the shard .* is damaged.*byte 2,048, between two members"):
        read(path, skip=False)
    assert read(path, skip=True) == [1]  # the second sample may lack members
    for zeros in (bytes(BLOCK), END):
        path.unlink()
        assert read(write(tmp_path, GOOD + NEXT + zeros, packed=packed), skip=False) == [1, 3]


def test_a_hundred_shards_with_random_headers(tmp_path: Path) -> None:
    """Nothing but DataError leaves a reader."""
    refused = 0
    for seed in range(100):
        rng = random.Random(seed)
        content = bytearray(GOOD + pax(path="b.cls") + member("b.cls", b"2") + NEXT + END)
        for _ in range(rng.randrange(1, 4)):
            at = BLOCK * rng.choice([0, 2, 4, 6]) + rng.choice([*range(100, 160), *range(257, 265)])
            content[at] = rng.randrange(256)
        for at in (0, 2, 4, 6):
            content[BLOCK * at : BLOCK * at + BLOCK] = signed(bytes(content[BLOCK * at : BLOCK * at + BLOCK]))
        path = write(tmp_path, bytes(content), packed=seed % 2 == 1)
        try:
            samples = read(path, skip=False)
        except DataError:
            refused += 1
        else:
            assert set(samples) <= {1, 2, 3}, seed
        path.unlink()
    assert refused


CONTENTS: dict[str, bytes] = {
    "x.cls": b"1" * 5000,
    "x.json": b"[" * 100_000,
    "y.json": b"\xff\xfe",
    "x.npy": b"\x93NUMPY\x01\x00v\x00{'descr': '<f8', 'fortran_order': False, 'shape': (1099511627776,), }".ljust(127)
    + b"\n",
    "y.npy": b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(127)
    + b"\n"
    + b"x" * 9,
    "z.npy": b"PK\x03\x04" + b"x" * 100,
    "x.txt": b"\xff",
}


@pytest.mark.parametrize("name", CONTENTS)
def test_contents_that_cannot_be_decoded_are_damage(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, member(name, CONTENTS[name]) + END, packed=False)
    with pytest.raises(DataError, match="is damaged"):
        read(path, skip=False)


def test_a_deep_line_of_json_is_damage(tmp_path: Path) -> None:
    (tmp_path / "deep.jsonl").write_text("[" * 100_000 + "\n")
    with pytest.raises(DataError, match=r"(?s)is damaged.*nested too deeply"):
        _ = Stream.json_lines(tmp_path / "deep.jsonl", window=1)[0]


def test_a_large_member_of_a_compressed_tar_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unisono.data.streaming.tar.MOST_SAMPLE", 2 << 20)
    monkeypatch.setattr("unisono.data.streaming.jsonl.MOST_SAMPLE", 2 << 20)
    path = write(tmp_path, GOOD + member("b.cls", bytes(3 << 20)) + END, packed=True)
    with pytest.raises(DataError, match=r"(?s)is damaged.*at most 2,097,152 are read"):
        read(path, skip=False)
    (tmp_path / "long.jsonl.gz").write_bytes(gzip.compress(b"1\n" + b" " * (3 << 20)))
    with pytest.raises(DataError, match=r"(?s)is damaged.*more than 2,097,152 bytes"):
        len(Stream.json_lines(tmp_path / "long.jsonl.gz"))


def test_a_shard_that_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.tar")
    (tmp_path / "device.tar").symlink_to("/dev/zero")
    for name in ("fifo.tar", "device.tar"):
        with pytest.raises(DataError, match=r"(?s)Cannot open the shard .*no regular file"):
            len(Stream.tar(tmp_path / name))


@pytest.mark.parametrize(
    "url",
    ["reference://x.json", "zip://a.tar::http://x/y.zip", "ssh://host/x.tar", "simplecache::s3://a/b.tar", "x://y"],
)
def test_urls_of_other_schemes_are_refused(url: str) -> None:
    with pytest.raises(DataError, match=r"(?s)Cannot read .*Shards are files, or URLs that begin with s3://"):
        Stream.tar(url)


def test_a_tar_in_memory_is_read_as_before(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("ü/" + "long" * 100 + "/a.cls")
        info.size = 1
        tar.addfile(info, io.BytesIO(b"7"))
    for packed in (False, True):
        assert read(write(tmp_path, buffer.getvalue(), packed=packed), skip=False) == [7]
