"""Load labeled images: formats, sources and errors."""

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
from unisono.recipes.datasets.images import (
    FASHION,
    IdxDataset,
    download,
    load_digits,
    load_images,
    load_published,
    read_idx,
)

needs_pillow = pytest.mark.skipif(importlib.util.find_spec("PIL") is None, reason="Pillow is not installed")
needs_sklearn = pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="scikit-learn is not installed")
needs_fashion = pytest.mark.skipif(not FASHION.folder.is_dir(), reason="dataset-fashion-mnist is not installed")

SHAPES = {
    "train-images-idx3-ubyte": (6, 5, 4),
    "train-labels-idx1-ubyte": (6,),
    "t10k-images-idx3-ubyte": (3, 5, 4),
    "t10k-labels-idx1-ubyte": (3,),
}
PIXEL = bytes.fromhex(  # a PNG of one gray pixel
    "89504e470d0a1a0a0000000d4948445200000001000000010800000000"
    "3a7e9b550000000a49444154789c63680000008200817735b3980000000049454e44ae426082"
)


def idx(*shape: int, first: int = 0) -> bytes:
    """Return an idx file whose bytes count up from `first`."""
    count = int(torch.tensor(shape).prod())
    return bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + bytes(range(first, first + count))


@pytest.fixture
def idx_folder(tmp_path: Path) -> Path:
    """Create a folder with four idx files, two of them compressed."""
    folder = tmp_path / "idx"
    folder.mkdir()
    for i, (name, shape) in enumerate(SHAPES.items()):
        if i % 2:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx(*shape)))
        else:
            (folder / name).write_bytes(idx(*shape))
    return folder


@pytest.fixture
def published(tmp_path: Path, idx_folder: Path, monkeypatch: pytest.MonkeyPatch) -> IdxDataset:
    """Return a data set that is not installed. Its site and its cache are folders of this test."""
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


def test_idx_file_has_the_shape_in_its_header(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(idx(2, 3, 4))
    assert torch.equal(read_idx(path), torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4))
    path.write_bytes(gzip.compress(idx(5)))
    assert read_idx(path).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "begins with nothing"),
        (b"\x89PNG\r\n", "begins with 89504e47"),
        (b"\0\0\x0d\x01\0\0\0\x01\0\0\0\0", "type 0x0d in 1 dimensions"),
        (b"\0\0\x08\0", "in 0 dimensions"),
        (idx(2, 3)[:9], "ends after 9 bytes, in its header of 12 bytes"),
        (idx(2, 3)[:-1], "has 5 bytes after its header, which gives 2x3 = 6"),
        (idx(2, 3) + b"x", "has 7 bytes after its header"),
        (b"\0\0\x08\x03" + b"\xff" * 12, "79,228,162,458,924,105,385,300,197,375"),
        (gzip.compress(idx(40))[:-12], "cannot be decompressed"),
        (b"\x1f\x8bnot at all", "cannot be decompressed"),
    ],
    ids=["empty", "png", "floats", "dimensionless", "half-header", "less", "more", "overflow", "half-gzip", "no-gzip"],
)
def test_damaged_idx_file_is_reported(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "broken-idx1-ubyte"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        read_idx(path)
    assert str(path) in str(error.value)


def test_wrong_sha256_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(idx(3))
    with pytest.raises(DataError, match=r"sha256 is .*, not 000000000000\.\.\."):
        read_idx(path, "0" * 64)


def test_folder_of_idx_files(idx_folder: Path) -> None:
    found = load_images(data=idx_folder)
    assert found.train.images.shape == (6, 1, 5, 4)
    assert found.valid.images.shape == (3, 1, 5, 4)
    assert found.train.labels.tolist() == [0, 1, 2, 3, 4, 5]
    assert found.train.first(2).labels.tolist() == [0, 1]
    assert len(found.classes) == 6
    assert f"{idx_folder}: 6 images for training, 3 for validation, 5x4x1, 6 classes" in found.summary()
    assert "\n" not in found.summary()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train-images-idx3-ubyte", idx(6, 20), "Its shape is 6x20"),
        ("train-images-idx3-ubyte", idx(0, 5, 4), "none of length 0"),
        ("train-labels-idx1-ubyte", idx(5), "has 5 labels for 6 images"),
        ("train-labels-idx1-ubyte", idx(6)[:8] + b"\3" * 6, r"All labels in train-labels-idx1-ubyte are equal"),
        ("t10k-images-idx3-ubyte", idx(3, 4, 5), "Its images are 4x5, and the training images 5x4"),
        ("t10k-labels-idx1-ubyte", None, "No such file"),
    ],
    ids=["two dimensions", "empty", "missing label", "one class", "two sizes", "no labels"],
)
def test_inconsistent_idx_files_are_reported(idx_folder: Path, name: str, content: bytes | None, message: str) -> None:
    (idx_folder / f"{name}.gz").unlink(missing_ok=True)
    if content is not None:
        (idx_folder / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        load_images(data=idx_folder)
    assert name in str(error.value)


# -- sources


def test_installed_files_are_preferred(published: IdxDataset, idx_folder: Path) -> None:
    idx_folder.rename(published.folder)
    found = load_images(published=replace(published, site="file:///nowhere"))
    assert (found.name, found.mirror, len(found.classes)) == ("Toys", True, 10)
    (published.folder / "train-images-idx3-ubyte").write_bytes(idx(6, 5, 4, first=1))
    with pytest.raises(DataError, match="train-images-idx3-ubyte"):  # no fallback for damaged files
        load_images(published=published)


def test_files_are_downloaded_once(published: IdxDataset, tmp_path: Path) -> None:
    found = load_images(published=published)
    cache = tmp_path / "home" / ".cache" / "unisono" / "toys"
    assert sorted(path.name for path in cache.iterdir()) == sorted(f"{name}.gz" for name in SHAPES)
    again = load_images("fashion", published=replace(published, site="file:///nowhere"))
    assert again.digest == found.digest


@pytest.mark.parametrize(
    "content",
    [b"<html>please pay</html>", gzip.compress(idx(3, first=9)), gzip.compress(b"")[:9]],
    ids=["HTML", "other content", "truncated"],
)
def test_damaged_download_is_not_stored(published: IdxDataset, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "site" / "t10k-labels-idx1-ubyte.gz").write_bytes(content)
    with pytest.raises(OSError, match=r"the downloaded t10k-labels-idx1-ubyte\.gz (is damaged|has sha256)"):
        download(published, tmp_path / "cache")
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == sorted(f"{n}.gz" for n in [*SHAPES][:3])
    with pytest.raises(DataError, match="Cannot download Toys from"):
        load_images("fashion", published=published)


@needs_sklearn
def test_digits_replace_a_failed_download(published: IdxDataset, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "site")
    found = load_images(published=published)
    assert found.name == "scikit-learn's digits"
    assert "(Toys is not installed and could not be downloaded: " in found.summary()


def test_source_and_folder_together_are_refused(idx_folder: Path) -> None:
    with pytest.raises(DataError, match="one of the two"):
        load_images("digits", idx_folder)


@needs_sklearn
def test_digits_of_scikit_learn() -> None:
    found = load_digits()
    assert len(found.train.labels) + len(found.valid.labels) == 1797
    assert found.train.images.shape[1:] == (1, 8, 8)
    assert found.train.images.max() == 240
    assert min(found.valid.labels.bincount()) > 30  # each class has validation images
    assert load_digits().digest == found.digest


def test_missing_scikit_learn_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r"pip install 'unisono\[image\]'"):
        load_images("digits")


@needs_fashion
def test_installed_fashion_mnist() -> None:
    found = load_published(FASHION, FASHION.folder)
    assert found.train.images.shape == (60_000, 1, 28, 28)
    assert found.valid.labels.bincount().tolist() == [1000] * 10
    assert "60,000 images for training, 10,000 for validation, 28x28x1, 10 classes, license MIT" in found.summary()


# -- one folder per class


def save_image(path: Path, mode: str, size: tuple[int, int], color: int | tuple[int, int, int] = 0) -> None:
    """Save an image of one color. Pillow is imported by name, because mypy fails if it is not installed."""
    importlib.import_module("PIL.Image").new(mode, size, color).save(path)


def save_classes(folder: Path, count: int = 5, size: tuple[int, int] = (6, 4)) -> Path:
    """Save `count` grayscale images of (width, height) in each of cats/ and dogs/."""
    for label, name in enumerate(("cats", "dogs")):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            save_image(folder / name / f"{i}.png", "L", size, 100 * label + i)
    return folder


@needs_pillow
def test_one_folder_per_class(tmp_path: Path) -> None:
    folder = save_classes(tmp_path / "mine")
    found = load_images(data=folder)
    assert found.classes == ("cats", "dogs")
    assert found.train.images.shape == (8, 1, 4, 6)
    assert found.train.labels.tolist() == [0] * 4 + [1] * 4
    assert found.valid.labels.tolist() == [0, 1]
    colors = torch.cat([found.train.images, found.valid.images])[:, 0, 0, 0]
    assert sorted(colors.tolist()) == [0, 1, 2, 3, 4, 100, 101, 102, 103, 104]
    shutil.copytree(folder, tmp_path / "elsewhere")
    assert load_images(data=tmp_path / "elsewhere").digest == found.digest


@needs_pillow
def test_one_color_image_makes_all_images_rgb(tmp_path: Path) -> None:
    folder = save_classes(tmp_path)
    save_image(folder / "cats" / "9.png", "RGB", (6, 4), (1, 2, 3))
    found = load_images(data=folder)
    assert found.train.images.shape[1:] == (3, 4, 6)


@needs_pillow
def test_truncated_image_is_reported(tmp_path: Path) -> None:
    path = save_classes(tmp_path, size=(60, 40)) / "dogs" / "3.png"
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(DataError, match=r"Cannot read the image .*dogs/3\.png"):
        load_images(data=tmp_path)


@needs_pillow
def test_image_of_another_size_is_reported(tmp_path: Path) -> None:
    save_image(save_classes(tmp_path) / "dogs" / "3.png", "L", (7, 4))
    with pytest.raises(DataError, match=r"It is 7x4, and .*cats/0\.png is 6x4") as error:
        load_images(data=tmp_path)
    assert "dogs/3.png" in str(error.value)


def test_too_few_classes_or_images_are_reported(tmp_path: Path) -> None:
    (tmp_path / "cats").mkdir()
    with pytest.raises(DataError, match=r"fewer than two classes.\n.*1 folders of images \(cats\).*no idx files"):
        load_images(data=tmp_path)
    (tmp_path / "dogs").mkdir()
    (tmp_path / "dogs" / "1.png").write_bytes(PIXEL)
    with pytest.raises(DataError, match=r"cats: .*\n.*It has 0 images.* 1 other classes"):
        load_images(data=tmp_path)
    (tmp_path / "cats").rmdir()
    (tmp_path / "birds").mkdir()
    for i in range(2):
        (tmp_path / "birds" / f"{i}.png").write_bytes(PIXEL)
    with pytest.raises(DataError, match=r"dogs: .*\n.*It has 1 images"):
        load_images(data=tmp_path)


def test_missing_pillow_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    for name in ("cats/1.png", "cats/2.png", "dogs/1.png", "dogs/2.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(PIXEL)
    with pytest.raises(DataError, match=r"pip install 'unisono\[image\]'"):
        load_images(data=tmp_path)


def test_missing_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no such folder"):
        load_images(data=tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="it is a file"):
        load_images(data=tmp_path / "file")
