"""The cache of remote shards: what it keeps, its limit, and every way in which a download can end badly."""

from __future__ import annotations

import errno
import json
import logging
import multiprocessing
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from tests.file_server import Server, serve
from tests.house.sources import ROOT
from tests.shards import COUNTS, write_lines, write_tars
from unisono.data.streaming import remote_file, shard_cache
from unisono.data.streaming.shard_cache import RemoteShard, ShardCache
from unisono.data.streaming.stream import Stream
from unisono.distributed.init import join_process_group as join
from unisono.environment import World
from unisono.errors import DataError

LENGTH = sum(COUNTS)
NAMES = "part-{0..3}.tar"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(remote_file, "WAITS", (0.05, 0.1))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    write_tars(tmp_path / "data")
    write_lines(tmp_path / "data", packed=True)
    with serve(tmp_path / "data", tmp_path / "seen") as server:
        yield server


def numbers(stream: Stream) -> list[int]:
    return [sample["cls"] for sample in stream.__getitems__(list(range(len(stream))))]


def cached(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.shard"))


def total(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.suffix in (".shard", ".partial"))


def test_a_shard_is_downloaded_once(server: Server, tmp_path: Path) -> None:
    cache = ShardCache(tmp_path / "cache", "1GB")
    for _ in range(3):
        assert numbers(Stream.tar(f"{server.url}/{NAMES}", cache=cache)) == list(range(LENGTH))
    size = (tmp_path / "data" / "part-2.tar").stat().st_size
    assert server.downloads("part-2.tar") == size
    assert len(cached(tmp_path / "cache")) == len(COUNTS)
    server.kill()
    (about,) = [json.loads(p.read_text()) for p in (tmp_path / "cache").glob("*.json") if "part-2.tar" in p.read_text()]
    assert about["size"] == size


def test_compressed_shards_are_cached_as_they_are(server: Server, tmp_path: Path) -> None:
    cache = ShardCache(tmp_path / "cache", "1GB")
    stream = Stream.json_lines(f"{server.url}/part-{{0..3}}.jsonl.gz", cache=cache)
    assert numbers(stream) == numbers(stream) == list(range(LENGTH))
    size = (tmp_path / "data" / "part-2.jsonl.gz").stat().st_size
    assert server.downloads("part-2.jsonl.gz") == size


def test_the_oldest_shards_leave_when_the_limit_is_reached(server: Server, tmp_path: Path) -> None:
    sizes = [(tmp_path / "data" / f"part-{i}.tar").stat().st_size for i in range(4)]
    cache = ShardCache(tmp_path / "cache", sizes[2] + sizes[0])
    for shard in (0, 2, 3):
        stream = Stream.tar(f"{server.url}/part-{shard}.tar", cache=cache)
        assert len(stream) == COUNTS[shard]
        del stream
        assert total(tmp_path / "cache") <= cache.limit_bytes
    text = "".join(path.read_text() for path in (tmp_path / "cache").glob("*.json"))
    assert "part-3.tar" in text
    assert "part-0.tar" not in text


def test_shards_in_use_stay_and_the_next_one_is_not_cached(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = [(tmp_path / "data" / f"part-{i}.tar").stat().st_size for i in range(4)]
    cache = ShardCache(tmp_path / "cache", sizes[2] + 1)
    stream = Stream.tar(f"{server.url}/{NAMES}", cache=cache, counts=COUNTS)
    assert stream[8]["cls"] == 8  # opens the third shard, and keeps it open
    shard_cache._not_cached.clear()
    with caplog.at_level(logging.WARNING):
        assert stream[0]["cls"] == 0
    assert "all shards in it are in use. It is read from its source" in caplog.text
    assert total(tmp_path / "cache") <= cache.limit_bytes
    assert stream[9]["cls"] == 9


def test_a_new_version_of_a_shard_is_downloaded(server: Server, tmp_path: Path) -> None:
    cache = ShardCache(tmp_path / "cache", "1GB")
    assert len(Stream.tar(f"{server.url}/part-0.tar", cache=cache)) == 7
    write_tars(tmp_path / "data", (4,))
    assert len(Stream.tar(f"{server.url}/part-0.tar", cache=cache)) == 4


@pytest.mark.parametrize("damage", ["cut", "changed", "changed before a reboot", "no description"])
def test_a_damaged_copy_is_downloaded_again(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    cache = ShardCache(tmp_path / "cache", "1GB")
    assert len(Stream.tar(f"{server.url}/part-2.tar", cache=cache)) == 13
    (path,) = cached(tmp_path / "cache")
    about, content, stat = json.loads(path.with_suffix(".json").read_text()), bytearray(path.read_bytes()), path.stat()
    if damage == "cut":
        path.write_bytes(content[:5000])
    elif damage == "no description":
        path.with_suffix(".json").unlink()
    else:
        content[700] ^= 1
        path.write_bytes(content)
        if "reboot" in damage:  # a disk that lost a write: only the checksum tells
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
            path.with_suffix(".json").write_text(json.dumps({**about, "boot": "another"}))
    with caplog.at_level(logging.WARNING):
        assert Stream.tar(f"{server.url}/part-2.tar", cache=cache)[3]["cls"] == 10
    assert "is damaged. It is downloaded again" in caplog.text
    assert server.downloads("part-2.tar") == 2 * len(content)


def test_a_copy_of_before_a_reboot_is_compared_once(server: Server, tmp_path: Path) -> None:
    cache = ShardCache(tmp_path / "cache", "1GB")
    assert len(Stream.tar(f"{server.url}/part-2.tar", cache=cache)) == 13
    (path,) = cached(tmp_path / "cache")
    about = json.loads(path.with_suffix(".json").read_text())
    path.with_suffix(".json").write_text(json.dumps({**about, "boot": "another"}))
    assert Stream.tar(f"{server.url}/part-2.tar", cache=cache)[3]["cls"] == 10
    assert json.loads(path.with_suffix(".json").read_text()) == about


# -- several processes, and kills


def read_all(url: str, folder: str, home: str, results: Any) -> None:
    os.environ["XDG_CACHE_HOME"] = home
    results.put(numbers(Stream.tar(f"{url}/{NAMES}", cache=ShardCache(folder, "1GB"))))


@pytest.mark.ci
def test_processes_that_begin_together_download_once(server: Server, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    given = (server.url, str(tmp_path / "cache"), str(tmp_path / "home"), results)
    processes = [context.Process(target=read_all, args=given) for _ in range(3)]
    for process in processes:
        process.start()
    assert [results.get(timeout=60) for _ in processes] == [list(range(LENGTH))] * 3
    for process in processes:
        process.join(10)
    assert server.downloads("part-2.tar") == (tmp_path / "data" / "part-2.tar").stat().st_size


KILLED = """
import os, signal, sys
from unisono.data.streaming.shard_cache import RemoteShard, ShardCache

class Source:
    def __init__(self): self.blocks = 0
    def __enter__(self): return self
    def __exit__(self, *_): pass
    def read(self, size):
        self.blocks += 1
        if self.blocks == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return b"x" * 1000

ShardCache(sys.argv[1], 10_000_000).open(RemoteShard("s3://bucket/a.tar", 4000, "1"), Source)
"""


class Source:
    """A source that sends these bytes."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def __call__(self) -> Any:
        return self

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read(self, size: int) -> bytes:
        content, self.content = self.content, b""
        return content


def opened(cache: ShardCache, name: str, content: bytes, size: int | None = None, sha256: str = "") -> IO[bytes] | None:
    size = len(content) if size is None else size
    return cache.open(RemoteShard(f"s3://bucket/{name}", size, "1", sha256), Source(content))


def test_a_kill_in_the_middle_of_a_download(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT, timeout=60)
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.glob("*.partial")
    assert left.stat().st_size == 4000  # as large as the shard, so only the name tells that it is not whole
    assert not cached(tmp_path)
    cache = ShardCache(tmp_path, 5000)
    file = opened(cache, "b.tar", b"y" * 3000)  # another shard: there is room, no process writes the partial file
    assert file is not None
    assert file.read() == b"y" * 3000
    file.close()
    assert not [*tmp_path.glob("*.partial")]
    file = opened(cache, "a.tar", b"z" * 4000)
    assert file is not None
    assert file.read() == b"z" * 4000
    file.close()
    assert total(tmp_path) == 4000


# -- what is refused, and what is read from its source


def test_a_download_that_is_not_what_the_source_said(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, "1MB")
    with pytest.raises(
        DataError, match=r"a.tar cannot be cached\.\n  It should have 900 bytes, and the download has 5"
    ):
        opened(cache, "a.tar", b"short", size=900)
    with pytest.raises(DataError, match=r"Its sha256 should be 000000"):
        opened(cache, "a.tar", b"12345", sha256="0" * 64)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_a_limit_below_a_shard_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has 2 MB, and the limit of the cache is 1 MB\.\n.*limit=\"8MB\""):
        opened(ShardCache(tmp_path, "1MB"), "a.tar", b"", size=2_000_000)
    for limit in (0, "many", "-1GB"):
        with pytest.raises(DataError, match="limit of a cache cannot be"):
            ShardCache(tmp_path, limit)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="Cannot cache shards in"):
        ShardCache(tmp_path / "file" / "cache", "1GB")


SMALL_DISK = """
import logging, os, subprocess, sys
logging.basicConfig(format="%(message)s")
folder, kind = sys.argv[1:]
from unisono.data.streaming.shard_cache import RemoteShard, ShardCache

class Source:
    def __init__(self, size): self.content = bytes(size)
    def __enter__(self): return self
    def __exit__(self, *_): pass
    def read(self, size):
        content, self.content = self.content, b""
        return content

if kind == "tmpfs":
    os.makedirs(folder)
    done = subprocess.run(["mount", "-n", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder])
    if done.returncode:
        print("no mount")
        sys.exit()
else:
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (700_000, 700_000))
cache = ShardCache(folder, "1GB")
for name, size in (("a.tar", 600_000), ("b.tar", 300_000), ("c.tar", 500_000), ("d.tar", 3_000_000)):
    file = cache.open(RemoteShard(f"s3://bucket/{name}", size), lambda: Source(size))
    print(name, "from its source" if file is None else f"cached, {len(file.read())} bytes")
    if file is not None:
        file.close()
print(sorted(os.path.splitext(name)[1] for name in os.listdir(folder)))
if kind == "tmpfs":
    subprocess.run(["umount", "-l", folder])
"""


@pytest.mark.parametrize("kind", ["tmpfs", "limit"])
def test_a_disk_that_fills_while_shards_are_cached(tmp_path: Path, kind: str) -> None:
    """Older shards make room; a shard that does not fit even then is read from its source, with a warning."""
    words = ["unshare", "-m"] if kind == "tmpfs" else []
    words += [sys.executable, "-c", SMALL_DISK, str(tmp_path / "disk"), kind]
    done = subprocess.run(words, cwd=ROOT, timeout=60, capture_output=True, text=True)
    if "no mount" in done.stdout or "unshare" in done.stderr:
        pytest.skip("needs root to mount a small disk")
    assert done.stdout.splitlines()[:4] == [
        "a.tar cached, 600000 bytes",
        "b.tar cached, 300000 bytes",
        "c.tar cached, 500000 bytes",
        "d.tar from its source",
    ], done.stderr
    reason = os.strerror(errno.ENOSPC if kind == "tmpfs" else errno.EFBIG)
    (warning,) = [line for line in done.stderr.splitlines() if "Cannot cache" in line]
    assert re.search(
        rf"Cannot cache s3://bucket/d.tar in .*: {reason} \(.* free\)\. It is read from its source\. Make room",
        warning,
    )
    assert ".partial" not in done.stdout


# -- a source that disappears


def test_a_source_that_disappears_is_named_and_is_no_damage(server: Server, tmp_path: Path) -> None:
    for stream in (Stream.tar(f"{server.url}/{NAMES}"), Stream.json_lines(f"{server.url}/part-{{0..3}}.jsonl.gz")):
        with join(World()) as group:
            stream.prepare(group, "skip")
        assert stream[0]["cls"] == 0
    server.kill()
    for form in ("tar", "jsonl.gz"):
        names = f"{server.url}/part-{{0..3}}.{form}"
        stream = Stream.tar(names, counts=COUNTS) if form == "tar" else Stream.json_lines(names, counts=COUNTS)
        stream._skip_damaged = True
        with pytest.raises(DataError, match=rf"part-2.{form} cannot be read any more\.\n  3 attempts in .* failed"):
            stream[8]


def test_a_source_that_comes_back(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    """The first reads fail, then they succeed: nothing is lost or repeated."""
    write_tars(tmp_path / "data")
    real, failures = remote_file.RemoteFile._opened, iter([True, True])

    def flaky(self: remote_file.RemoteFile) -> Any:
        if next(failures, False):
            raise ConnectionResetError("gone")
        return real(self)

    monkeypatch.setattr(remote_file.RemoteFile, "_opened", flaky)
    with serve(tmp_path / "data", tmp_path / "seen") as server, caplog.at_level(logging.WARNING):
        assert numbers(Stream.tar(f"{server.url}/{NAMES}")) == list(range(LENGTH))
    assert caplog.text.count("Trying again") == 2


def test_a_shard_that_is_missing_at_its_source(server: Server, tmp_path: Path) -> None:
    for cache in (None, ShardCache(tmp_path / "cache", "1GB")):
        with pytest.raises(DataError, match=r"Cannot open the shard http://.*/part-9.tar\.\n  FileNotFoundError"):
            len(Stream.tar(f"{server.url}/part-9.tar", cache=cache))


def test_a_source_that_disappears_during_a_download(server: Server, tmp_path: Path, monkeypatch: Any) -> None:
    read, reads = remote_file.RemoteFile.readinto, iter([True])

    def killing(self: remote_file.RemoteFile, buffer: Any) -> int:
        if not next(reads, False):
            server.kill()
            self._file = None
        return read(self, buffer)

    monkeypatch.setattr(remote_file.RemoteFile, "readinto", killing)
    monkeypatch.setattr(remote_file, "BUFFER", 1000)
    monkeypatch.setattr(shard_cache, "BLOCK", 1000)
    with pytest.raises(DataError, match="cannot be read any more"):
        len(Stream.tar(f"{server.url}/part-2.tar", cache=ShardCache(tmp_path / "cache", "1GB")))
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["lock"]


WAITING = """
import sys, time
from unisono.data.streaming.shard_cache import RemoteShard, ShardCache

class Source:
    def __init__(self): self.left = [b"x" * 1000] * 4
    def __enter__(self): return self
    def __exit__(self, *_): pass
    def read(self, size):
        if len(self.left) == 4:
            print("downloads", flush=True)
            sys.stdin.readline()
        return self.left.pop() if self.left else b""

file = ShardCache(sys.argv[1], 10_000_000).open(RemoteShard("s3://bucket/a.tar", 4000, "1"), Source)
print("reads", len(file.read()), flush=True)
sys.stdin.readline()  # keeps the shard open
"""


def test_a_process_that_waited_reads_beside_the_one_that_downloaded(tmp_path: Path) -> None:
    """Also while the other one keeps the shard open: both have a shared lock then."""
    pipe = subprocess.PIPE
    words = [sys.executable, "-c", WAITING, str(tmp_path)]
    processes = [subprocess.Popen(words, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) for _ in range(3)]
    try:
        lines = [process.stdout for process in processes if process.stdout is not None]
        ready, _, _ = select.select(lines, [], [], 60)
        (first,) = [process for process in processes if process.stdout in ready]
        assert first.stdout is not None
        assert first.stdout.readline() == "downloads\n"
        assert select.select([line for line in lines if line is not first.stdout], [], [], 0.5)[0] == []
        assert first.stdin is not None
        first.stdin.write("\n")
        first.stdin.flush()
        assert [line.readline() for line in lines] == ["reads 4000\n"] * 3
    finally:
        for process in processes:
            process.kill()
            process.communicate()
