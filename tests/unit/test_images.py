"""Labelled pictures: what is read, what is refused, and where they are looked for."""

from __future__ import annotations

import gzip
import hashlib
import importlib
import importlib.util
import shutil
import struct
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from unisono import DataError
from unisono.recipes.datasets.images import FASHION, Collection, digits, fetch, pictures, published, read_idx

needs_pillow = pytest.mark.skipif(importlib.util.find_spec("PIL") is None, reason="Pillow is not installed")
needs_sklearn = pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="scikit-learn is not installed")
needs_fashion = pytest.mark.skipif(not FASHION.folder.is_dir(), reason="dataset-fashion-mnist is not installed")

SHAPES = {
    "train-images-idx3-ubyte": (6, 5, 4),
    "train-labels-idx1-ubyte": (6,),
    "t10k-images-idx3-ubyte": (3, 5, 4),
    "t10k-labels-idx1-ubyte": (3,),
}
PIXEL = bytes.fromhex(  # a PNG of one grey pixel
    "89504e470d0a1a0a0000000d4948445200000001000000010800000000"
    "3a7e9b550000000a49444154789c63680000008200817735b3980000000049454e44ae426082"
)


def idx(*shape: int, first: int = 0) -> bytes:
    """An idx file of bytes that count up from `first`, modulo 7."""
    count = int(torch.tensor(shape).prod())
    return bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + bytes(range(first, first + count))


@pytest.fixture
def four(tmp_path: Path) -> Path:
    """A folder with a set of four idx files, two of them gzipped."""
    folder = tmp_path / "four"
    folder.mkdir()
    for i, (name, shape) in enumerate(SHAPES.items()):
        if i % 2:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx(*shape)))
        else:
            (folder / name).write_bytes(idx(*shape))
    return folder


@pytest.fixture
def collection(tmp_path: Path, four: Path, monkeypatch: pytest.MonkeyPatch) -> Collection:
    """A collection that is not installed, whose site is a folder of this test, and whose cache is one as well."""
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    site = tmp_path / "site"
    site.mkdir()
    for name, shape in SHAPES.items():
        (site / f"{name}.gz").write_bytes(gzip.compress(idx(*shape)))
    return replace(
        FASHION,
        name="Toys",
        site=site.as_uri(),
        folder=tmp_path / "installed",
        cache="toys",
        sha256={name: hashlib.sha256(idx(*shape)).hexdigest() for name, shape in SHAPES.items()},
    )


# -- idx files


def test_an_idx_file_has_its_own_shape(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(idx(2, 3, 4))
    assert torch.equal(read_idx(path), torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4))
    path.write_bytes(gzip.compress(idx(5)))
    assert read_idx(path).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "begins with nothing"),
        (b"\x89PNG\r\n", "begins with 89504e47"),
        (b"\0\0\x0d\x01\0\0\0\x01\0\0\0\0", "kind 0x0d in 1 dimensions"),
        (b"\0\0\x08\0", "in 0 dimensions"),
        (idx(2, 3)[:9], "ends after 9 bytes, within its header of 12"),
        (idx(2, 3)[:-1], "has 5 bytes behind its header, which says 2x3 = 6"),
        (idx(2, 3) + b"x", "has 7 bytes behind its header"),
        (b"\0\0\x08\x03" + b"\xff" * 12, "79,228,162,458,924,105,385,300,197,375"),
        (gzip.compress(idx(40))[:-12], "cannot be unpacked"),
        (b"\x1f\x8bnot at all", "cannot be unpacked"),
    ],
    ids=["empty", "png", "floats", "dimensionless", "half-header", "less", "more", "overflow", "half-gzip", "no-gzip"],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "broken-idx1-ubyte"
    path.write_bytes(content)
    with pytest.raises(DataError, match=told) as error:
        read_idx(path)
    assert str(path) in str(error.value)


def test_a_file_that_is_another_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(idx(3))
    with pytest.raises(DataError, match=r"sha256 .*, not 000000000000\.\.\."):
        read_idx(path, "0" * 64)


def test_four_files_are_a_set(four: Path) -> None:
    found = pictures(data=four)
    assert found.train.images.shape == (6, 1, 5, 4)
    assert found.valid.images.shape == (3, 1, 5, 4)
    assert found.train.labels.tolist() == [0, 1, 2, 3, 4, 5]
    assert found.train.first(2).labels.tolist() == [0, 1]
    assert len(found.classes) == 6
    assert f"{four}: 6 pictures to train on, 3 to validate on, 5x4x1, 6 classes" in found.line()
    assert "\n" not in found.line()


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("train-images-idx3-ubyte", idx(6, 20), "Its shape is 6x20"),
        ("train-images-idx3-ubyte", idx(0, 5, 4), "none of length 0"),
        ("train-labels-idx1-ubyte", idx(5), "has 5 labels for 6 pictures"),
        ("train-labels-idx1-ubyte", idx(6)[:8] + b"\3" * 6, "labels of one class only"),
        ("t10k-images-idx3-ubyte", idx(3, 4, 5), "Its pictures are 4x5, those to train on 5x4"),
        ("t10k-labels-idx1-ubyte", None, "No such file"),
    ],
    ids=["other pictures", "none at all", "a label less", "one class", "two shapes", "no labels"],
)
def test_what_does_not_fit_together_is_named(four: Path, name: str, content: bytes | None, told: str) -> None:
    (four / f"{name}.gz").unlink(missing_ok=True)
    if content is not None:
        (four / name).write_bytes(content)
    with pytest.raises(DataError, match=told) as error:
        pictures(data=four)
    assert name in str(error.value)


# -- where they are looked for


def test_the_installed_set_comes_first(collection: Collection, four: Path) -> None:
    four.rename(collection.folder)
    found = pictures(collection=replace(collection, site="file:///nowhere"))
    assert (found.name, found.mirror, len(found.classes)) == ("Toys", True, 10)
    (collection.folder / "train-images-idx3-ubyte").write_bytes(idx(6, 5, 4, first=1))
    with pytest.raises(DataError, match="train-images-idx3-ubyte"):  # installed but damaged is not passed over
        pictures(collection=collection)


def test_it_is_fetched_once(collection: Collection, tmp_path: Path) -> None:
    found = pictures(collection=collection)
    cache = tmp_path / "home" / ".cache" / "unisono" / "toys"
    assert sorted(path.name for path in cache.iterdir()) == sorted(f"{name}.gz" for name in SHAPES)
    again = pictures("fashion", collection=replace(collection, site="file:///nowhere"))
    assert again.digest == found.digest


@pytest.mark.parametrize(
    "content",
    [b"<html>please pay</html>", gzip.compress(idx(3, first=9)), gzip.compress(b"")[:9]],
    ids=["a page", "other digits", "half a gzip"],
)
def test_what_came_damaged_is_not_kept(collection: Collection, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "site" / "t10k-labels-idx1-ubyte.gz").write_bytes(content)
    with pytest.raises(OSError, match=r"t10k-labels-idx1-ubyte\.gz came"):
        fetch(collection, tmp_path / "cache")
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == sorted(f"{n}.gz" for n in [*SHAPES][:3])
    with pytest.raises(DataError, match="did not give them"):
        pictures("fashion", collection=collection)


@needs_sklearn
def test_without_a_network_there_are_digits(collection: Collection, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "site")
    found = pictures(collection=collection)
    assert found.name == "scikit-learn's digits"
    assert "(Toys is not installed and could not be fetched: " in found.line()


def test_two_places_at_once_are_refused(four: Path) -> None:
    with pytest.raises(DataError, match="one of the two"):
        pictures("digits", four)


@needs_sklearn
def test_the_digits() -> None:
    found = digits()
    assert len(found.train.labels) + len(found.valid.labels) == 1797
    assert found.train.images.shape[1:] == (1, 8, 8)
    assert found.train.images.max() == 240
    assert min(found.valid.labels.bincount()) > 30  # every class has its part in it
    assert digits().digest == found.digest


def test_without_scikit_learn_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r"pip install 'unisono\[recipes\]'"):
        pictures("digits")


@needs_fashion
def test_fashion_mnist_as_it_is_installed() -> None:
    found = published(FASHION, FASHION.folder)
    assert found.train.images.shape == (60_000, 1, 28, 28)
    assert found.valid.labels.bincount().tolist() == [1000] * 10
    assert "60,000 pictures to train on, 10,000 to validate on, 28x28x1, 10 classes, licence MIT" in found.line()


# -- a folder for every class


def draw(path: Path, mode: str, size: tuple[int, int], colour: int | tuple[int, int, int] = 0) -> None:
    """A picture of one colour, by Pillow, which mypy does not know where it is not installed."""
    importlib.import_module("PIL.Image").new(mode, size, colour).save(path)


def rooms(folder: Path, count: int = 5, size: tuple[int, int] = (6, 4)) -> Path:
    """cats/ and dogs/ with so many grey pictures each, of (width, height)."""
    for label, name in enumerate(("cats", "dogs")):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            draw(folder / name / f"{i}.png", "L", size, 100 * label + i)
    return folder


@needs_pillow
def test_a_folder_for_every_class(tmp_path: Path) -> None:
    folder = rooms(tmp_path / "mine")
    found = pictures(data=folder)
    assert found.classes == ("cats", "dogs")
    assert found.train.images.shape == (8, 1, 4, 6)
    assert found.train.labels.tolist() == [0] * 4 + [1] * 4
    assert found.valid.labels.tolist() == [0, 1]
    everything = torch.cat([found.train.images, found.valid.images])[:, 0, 0, 0]
    assert sorted(everything.tolist()) == [0, 1, 2, 3, 4, 100, 101, 102, 103, 104]
    shutil.copytree(folder, tmp_path / "elsewhere")
    assert pictures(data=tmp_path / "elsewhere").digest == found.digest


@needs_pillow
def test_one_picture_in_colour_makes_all_of_them_so(tmp_path: Path) -> None:
    folder = rooms(tmp_path)
    draw(folder / "cats" / "9.png", "RGB", (6, 4), (1, 2, 3))
    found = pictures(data=folder)
    assert found.train.images.shape[1:] == (3, 4, 6)


@needs_pillow
def test_a_truncated_picture_is_named(tmp_path: Path) -> None:
    path = rooms(tmp_path, size=(60, 40)) / "dogs" / "3.png"
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(DataError, match=r"dogs/3\.png was to be read"):
        pictures(data=tmp_path)


@needs_pillow
def test_pictures_of_another_size_are_named(tmp_path: Path) -> None:
    draw(rooms(tmp_path) / "dogs" / "3.png", "L", (7, 4))
    with pytest.raises(DataError, match=r"It is 7x4, and .*cats/0\.png is 6x4") as error:
        pictures(data=tmp_path)
    assert "dogs/3.png" in str(error.value)


def test_an_empty_class_and_a_lonely_one_are_named(tmp_path: Path) -> None:
    (tmp_path / "cats").mkdir()
    with pytest.raises(DataError, match="fewer than two classes"):
        pictures(data=tmp_path)
    (tmp_path / "dogs").mkdir()
    (tmp_path / "dogs" / "1.png").write_bytes(PIXEL)
    with pytest.raises(DataError, match=r"class 'cats'.*\n.*It has 0 files"):
        pictures(data=tmp_path)
    (tmp_path / "cats").rmdir()
    (tmp_path / "birds").mkdir()
    for i in range(2):
        (tmp_path / "birds" / f"{i}.png").write_bytes(PIXEL)
    with pytest.raises(DataError, match=r"class 'dogs'.*\n.*It has 1 files"):
        pictures(data=tmp_path)


def test_without_pillow_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    for name in ("cats/1.png", "cats/2.png", "dogs/1.png", "dogs/2.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(PIXEL)
    with pytest.raises(DataError, match="pip install pillow"):
        pictures(data=tmp_path)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="There is no such folder"):
        pictures(data=tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="It is a file"):
        pictures(data=tmp_path / "file")
