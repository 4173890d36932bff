"""Shards written from folders: every form, the same bytes each time, an interruption at any place, and bad files."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from unisono.data.shard_writing import shard_writer
from unisono.data.shard_writing.shard_writer import ShardPlan, Written, write_shards
from unisono.data.shard_writing.source_samples import find_samples
from unisono.data.streaming.shard_index import read_index
from unisono.data.streaming.stream import Stream
from unisono.errors import DataError


def jpeg(color: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (color, 255 - color, 100)).save(buffer, "JPEG")
    return buffer.getvalue()


def classes(folder: Path, count: int = 30) -> Path:
    for label, name in enumerate(("cat", "dog", "eel")):
        (folder / name / "more").mkdir(parents=True)
        for number in range(count // 3):
            place = folder / name / ("more" if number % 2 else "") / f"{number:03d}.v{label}.JPG"
            place.write_bytes(jpeg(10 * label + number))
    (folder / ".hidden").mkdir()
    return folder


def write(folder: Path, out: Path, shard_bytes: int = 6000, **more: Any) -> Written:
    given = {"form": None, "order": None, "seed": 0, "skip_bad": False, "force": False, "workers": 2} | more
    source = find_samples(folder, given["form"], given["order"], given["seed"])
    plan = ShardPlan(source, out, shard_bytes, given["skip_bad"])
    return write_shards(plan, given["workers"], given["force"], lambda done, count: None)


def content(out: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(out.iterdir())}


def test_a_folder_for_each_class(tmp_path: Path) -> None:
    folder, out = classes(tmp_path / "pictures"), tmp_path / "out"
    written = write(folder, out)
    assert written.index.classes == ("cat", "dog", "eel")
    stream = Stream.indexed(out)
    assert len(written.index.shards) > 3
    assert stream.counts == tuple(entry.samples for entry in written.index.shards)
    assert stream.classes == ("cat", "dog", "eel")
    samples = stream.__getitems__(list(range(30)))
    assert len({sample["__key__"] for sample in samples}) == 30
    for sample in samples:
        name, _, base = sample["__key__"].rpartition("/")
        number, _, version = base.partition("%2E")
        label = stream.classes.index(name.split("/")[0])
        assert sample["cls"] == label
        assert version == f"v{label}"
        assert sample["jpg"] == jpeg(10 * label + int(number))
    labels = [sample["cls"] for sample in samples]
    assert labels != sorted(labels)  # neighbors are not of one class


def test_other_readers_of_tar_files_see_the_same_samples(tmp_path: Path) -> None:
    write(classes(tmp_path / "pictures"), tmp_path / "out")
    ours = Stream.indexed(tmp_path / "out")
    theirs = Stream.tar(str(tmp_path / "out" / "shard-*.tar"))  # scans them
    assert theirs.__getitems__(list(range(len(theirs)))) == ours.__getitems__(list(range(30)))
    (first, *_) = sorted((tmp_path / "out").glob("*.tar"))
    with tarfile.open(first) as tar:
        assert [name.rpartition(".")[2] for name in tar.getnames()[:4]] == ["jpg", "cls", "jpg", "cls"]


def test_files_that_share_a_name_are_a_sample(tmp_path: Path) -> None:
    (tmp_path / "in" / "a.b").mkdir(parents=True)
    for number in range(9):
        (tmp_path / "in" / "a.b" / f"{number}.txt").write_text("ä" * (number + 1))
        (tmp_path / "in" / "a.b" / f"{number}.more.json").write_text(json.dumps(number))
    write(tmp_path / "in", tmp_path / "out", form="files", order="sorted")
    assert Stream.indexed(tmp_path / "out")[4] == {"__key__": "a.b/4", "txt": "ä" * 5, "more.json": 4}


def test_lines_keep_their_order(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text("".join(f"\n{i}\r\n" for i in range(50)))
    (tmp_path / "in" / "b.jsonl").write_text("".join(f'{{"x": {i}}}\n' for i in range(5)) + " \r\n99")
    written = write(tmp_path / "in", tmp_path / "out")
    stream = Stream.indexed(tmp_path / "out")
    assert len(written.index.shards) > 2
    assert stream.__getitems__(list(range(56))) == [*range(50), *({"x": i} for i in range(5)), 99]
    counted = Stream.json_lines(str(tmp_path / "out" / "shard-*.jsonl"))
    assert (len(counted), counted.counts) == (56, stream.counts)
    write(tmp_path / "in" / "a.jsonl", tmp_path / "one", order="shuffled")
    shuffled = Stream.indexed(tmp_path / "one").__getitems__(list(range(50)))
    assert shuffled != list(range(50))
    assert sorted(shuffled) == list(range(50))


def test_the_same_folder_gives_the_same_bytes(tmp_path: Path) -> None:
    write(classes(tmp_path / "one" / "pictures"), tmp_path / "out1", workers=1)
    write(classes(tmp_path / "two" / "pictures"), tmp_path / "out2", workers=4)
    assert content(tmp_path / "out1") == content(tmp_path / "out2")
    write(tmp_path / "one" / "pictures", tmp_path / "out3", seed=1)
    assert content(tmp_path / "out3") != content(tmp_path / "out1")


@pytest.mark.parametrize("stop", [0, 1, 4, 6, 12, 27])
def test_an_interrupted_command_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int) -> None:
    """It ends at any write: shards that are done stay, and the result has the bytes of a command that ran through."""
    folder = classes(tmp_path / "pictures")
    write(folder, tmp_path / "whole")
    calls = iter(range(1000))
    real = shard_writer.os.fsync

    def ends(file: int) -> None:
        if next(calls) == stop:
            raise KeyboardInterrupt
        real(file)

    monkeypatch.setattr(shard_writer.os, "fsync", ends)
    with pytest.raises(KeyboardInterrupt):
        write(folder, tmp_path / "out", workers=1)
    assert not (tmp_path / "out" / "index.json").exists()
    before = len([*(tmp_path / "out").glob("shard-*.tar")])
    written = write(folder, tmp_path / "out", workers=1)
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert before - 1 <= written.resumed <= before
    assert write(folder, tmp_path / "out").resumed == len(written.index.shards)  # nothing is left to do


def test_a_folder_with_something_else_is_refused(tmp_path: Path) -> None:
    folder, out = classes(tmp_path / "pictures"), tmp_path / "out"
    write(folder, out)
    with pytest.raises(DataError, match="Its shards are of other files or other options"):
        write(folder, out, seed=1)
    assert write(folder, out, seed=1, force=True).resumed == 0
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    for force in (False, True):
        with pytest.raises(DataError, match=r"It has files"):
            write(folder, tmp_path / "mine", force=force)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


def test_pictures_that_are_none(tmp_path: Path) -> None:
    folder, out = classes(tmp_path / "pictures"), tmp_path / "out"
    (folder / "cat" / "page.jpg").write_text("<html>not found</html>")
    (folder / "dog" / "empty.png").touch()
    (folder / "dog" / "cut.jpg").write_bytes(jpeg(7)[:400])
    (folder / "eel" / "other.txt").write_text("any text is a text")
    with pytest.raises(DataError) as caught:
        write(folder, out)
    lines = str(caught.value).splitlines()
    assert lines[0] == "3 files are damaged, or not what the name says."
    assert lines[1] == f"  {folder}/cat/page.jpg: it is no jpg, since it begins with b'<html>not fo'"
    assert lines[2] == f"  {folder}/dog/cut.jpg: it is cut off, since it has no end marker of a JPEG"
    assert lines[3] == f"  {folder}/dog/empty.png: it is empty"
    assert "--skip-bad" in lines[4]
    assert not (out / "index.json").exists()
    (folder / "cat" / "page.jpg").write_bytes(jpeg(3)[:22] + jpeg(3)[22:])
    written = write(folder, tmp_path / "rest", skip_bad=True)
    assert len(written.skipped) == 2
    assert (tmp_path / "rest" / "skipped.txt").read_text().count("\n") == 2
    assert len(Stream.indexed(tmp_path / "rest")) == 32


def test_lines_that_are_no_json(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('1\n{"x": \n3\n')
    with pytest.raises(DataError, match=r"1 file is damaged.*\n.*a.jsonl, byte 2: Expecting value"):
        write(tmp_path / "a.jsonl", tmp_path / "out")


def empty_class(folder: Path) -> None:
    (folder / "fish").mkdir()


def beside(folder: Path) -> None:
    (folder / "README").touch()


def no_extension(folder: Path) -> None:
    (folder / "cat" / "picture").touch()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (empty_class, "The class fish has no files"),
        (beside, r"has 3 folders and 1 file\.\n.*README is beside it"),
        (no_extension, "cat/picture has no extension"),
    ],
)
def test_a_folder_that_is_not_clear(tmp_path: Path, change: Any, message: str) -> None:
    folder = classes(tmp_path / "pictures")
    change(folder)
    with pytest.raises(DataError, match=message):
        write(folder, tmp_path / "out")


def test_other_folders_that_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="There are no samples"):
        write(tmp_path / "empty", tmp_path / "out")
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "a.jsonl.gz").touch()
    with pytest.raises(DataError, match=r"a.jsonl.gz is compressed"):
        write(tmp_path / "packed", tmp_path / "out")
    with pytest.raises(DataError, match="Cannot read"):
        write(tmp_path / "nothing", tmp_path / "out")


# -- the index


def test_no_shard_is_scanned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from unisono.data.streaming import jsonl, tar

    write(classes(tmp_path / "pictures"), tmp_path / "out")
    monkeypatch.setattr(tar.TarReader, "_scan", None)
    monkeypatch.setattr(jsonl.LineReader, "_scan", None)
    stream = Stream.indexed(tmp_path / "out" / "index.json", window=5)
    assert len(stream) == 30
    assert stream[17]["jpg"].startswith(b"\xff\xd8")
    with pytest.raises(DataError, match="FileNotFoundError"):
        Stream.indexed(tmp_path)


def change_index(out: Path, **more: Any) -> None:
    index = json.loads((out / "index.json").read_text())
    shard = {name: more.pop(name) for name in ("name", "samples", "sha256") if name in more}
    index |= more
    index["shards"][1] |= shard
    (out / "index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 1}, "its format is not 2"),
        ({"kind": "zip"}, "its kind is 'zip'"),
        ({"shards": [{}]}, "It has no 'name'"),
        ({"name": "../../etc/passwd"}, "'../../etc/passwd' is no name of a shard"),
        ({"samples": -3}, "has -3 samples"),
        ({"samples": "7"}, "has '7' samples"),
        ({"sha256": "x"}, "has no checksum"),
        (b'{"format": 2, "kind": "ta', "Unterminated string"),
        (b"", "Expecting value"),
        (b"[]", "its format is not"),
    ],
    ids=str,
)
def test_a_broken_index_is_named(tmp_path: Path, change: Any, message: str) -> None:
    out = tmp_path / "out"
    write(classes(tmp_path / "pictures", 6), out, shard_bytes=3000)
    if isinstance(change, bytes):
        (out / "index.json").write_bytes(change)
    elif "shards" in change:
        (out / "index.json").write_text(json.dumps({"format": 2, "kind": "tar", **change}))
    else:
        change_index(out, **change)
    with pytest.raises(DataError, match=rf"The index {out}/index.json is broken\.\n.*{message}"):
        Stream.indexed(out)


def test_the_index_and_the_shards_do_not_match(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(classes(tmp_path / "pictures", 6), out, shard_bytes=3000)
    index = read_index(out)
    assert index.text() == (out / "index.json").read_text()
    names, size = [entry.name for entry in index.shards], index.shards[1].bytes
    stream = Stream.indexed(out)
    counts = [entry.samples for entry in index.shards]
    for offsets in ('[["a", [["jpg", -5, 3]]]]', "[]"):
        (out / f"{names[2]}.json").write_text(offsets)
        with pytest.raises(DataError, match=rf"{names[2]}.json of a shard is broken"):
            stream[sum(counts[:2])]
    (out / names[0]).unlink()
    (out / names[1]).write_bytes((out / names[1]).read_bytes()[:-2048])  # between two members
    with pytest.raises(DataError) as caught:
        Stream.indexed(out)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"Cannot open the shard {out}/{names[0]}."
    assert lines[3] == f"The shard {out}/{names[1]} is cut short."
    assert lines[4] == f"  It has {size - 2048:,} bytes, and {size:,} in its index."
    assert "unisono shards FOLDER OUT" in lines[5]


def test_a_repeated_command_writes_the_shards_that_are_missing_or_cut(tmp_path: Path) -> None:
    folder, out = classes(tmp_path / "pictures"), tmp_path / "out"
    count, before = len(write(folder, out).index.shards), content(out)
    first, second, third, *_ = sorted(out.glob("*.tar"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:-2048])
    third.with_name(f"{third.name}.json").unlink()
    assert write(folder, out).resumed == count - 3
    assert content(out) == before
    first.unlink()
    assert write(folder, tmp_path / "other", skip_bad=True).resumed == 0
    next((tmp_path / "other").glob("*.tar")).unlink()
    assert write(folder, tmp_path / "other", skip_bad=True).resumed == 0
    assert {name: found for name, found in content(tmp_path / "other").items() if name != "index.json"} == {
        name: found for name, found in before.items() if name != "index.json"
    }
