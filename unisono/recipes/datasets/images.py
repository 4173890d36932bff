"""Labelled pictures to train on: one's own, Fashion-MNIST where it is or can be had, or scikit-learn's digits.

Fashion-MNIST (Xiao, Rasul, Vollgraf, arXiv 1708.07747) is 70,000 grey pictures of clothes, 28x28, in ten classes: as
large as MNIST and much harder. Its four files are checked against their sha256, so wherever they come from, the run is
the same. The digits are 1,797 pictures of 8x8 that scikit-learn brings along: no download, for a first look.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.client
import importlib
import os
import struct
import tempfile
import urllib.request
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from unisono import DataError

Source = Literal["auto", "fashion", "digits"]

VALID_SHARE = 0.2
"""The share of every class that is kept for validation, where the data does not say it itself."""

DOWNLOAD_SECONDS = 5.0
"""How long a site may be silent before we go on without it."""

_ENDINGS = {".png", ".jpg", ".jpeg"}
_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


@dataclass(frozen=True, kw_only=True)
class Collection:
    """A published set of four idx files: where it is, and what must be in it."""

    name: str
    licence: str
    classes: tuple[str, ...]
    mirror: bool
    site: str
    """The address below which the files lie, as file.gz."""
    folder: Path
    """Where a package of the system puts them."""
    cache: str
    """The folder's name below ~/.cache/unisono, for what was downloaded."""
    sha256: Mapping[str, str]
    """By file, of what is in it when unpacked: the same files are packed in more than one way."""


FASHION = Collection(
    name="Fashion-MNIST",
    licence="MIT",
    classes=("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"),
    mirror=True,
    site="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
    folder=Path("/usr/share/datasets/fashion-mnist"),  # Debian's package dataset-fashion-mnist
    cache="fashion-mnist",
    sha256={
        "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    },
)


class ImageSplit(NamedTuple):
    """Pictures and what is on them."""

    images: Tensor
    """uint8 [pictures, channels, height, width]"""
    labels: Tensor
    """int64 [pictures], numbers of classes"""

    def first(self, pictures: int | None) -> ImageSplit:
        """The first so many of them; None: all."""
        return ImageSplit(self.images[:pictures], self.labels[:pictures])


@dataclass(frozen=True, kw_only=True)
class ImageData:
    """Labelled pictures in two parts; all have one shape."""

    name: str
    licence: str
    classes: tuple[str, ...]
    train: ImageSplit
    valid: ImageSplit
    mirror: bool = False
    """Does a picture stay in its class when left and right change places? A shoe does, a digit does not."""
    instead: str = ""
    """Why it is not what one would rather have."""
    digest: str = field(init=False)
    """The first 12 digits of the sha256 over all pictures and labels: equal digests, equal data."""

    def __post_init__(self) -> None:
        digest = hashlib.sha256()
        for tensor in (*self.train, *self.valid):
            digest.update(f"{tuple(tensor.shape)}\0".encode())
            digest.update(tensor.contiguous().numpy().data)
        object.__setattr__(self, "digest", digest.hexdigest()[:12])

    def line(self) -> str:
        """What the data is, how much, under which licence: one line."""
        channels, height, width = self.train.images.shape[1:]
        return (
            f"{self.name}: {len(self.train.labels):,} pictures to train on, {len(self.valid.labels):,} to validate on, "
            f"{height}x{width}x{channels}, {len(self.classes)} classes, licence {self.licence}, digest {self.digest}"
            + (f" ({self.instead})" if self.instead else "")
        )


def pictures(source: Source = "auto", data: Path | None = None, *, collection: Collection = FASHION) -> ImageData:
    """The pictures that were asked for, read in less than two seconds once they are on the disk.

    data        a folder with four idx files, or with a folder of PNG or JPEG files for every class (needs Pillow)
    source      fashion: the collection, from the system's package, from the cache, or from its site into the cache;
                digits: scikit-learn's; auto: the collection, and the digits where it cannot be had

    Raises DataError for data that is missing, damaged, or of fewer than two classes. What is there but damaged is never
    passed over for something else.
    """
    if data is not None:
        if source != "auto":
            raise DataError(
                f"The pictures were to come from source={source}, and from data={data}.",
                "They can come from one of the two.",
                f"--set source=auto to take {data}, or --set data=none",
            )
        return _from_folder(data)
    if source == "digits":
        return digits()
    if collection.folder.is_dir():
        return published(collection, collection.folder)
    cache = Path.home() / ".cache" / "unisono" / collection.cache
    try:
        fetch(collection, cache)
    except (OSError, http.client.HTTPException) as error:
        why = str(error) or type(error).__name__
        if source == "fashion":
            raise DataError(
                f"The pictures of {collection.name} were asked for.",
                f"They are not in {collection.folder}, and {collection.site} did not give them: {why}.",
                f"apt install dataset-fashion-mnist, or copy its files to {cache}, or --set source=digits",
            ) from None
        return replace(digits(), instead=f"{collection.name} is not installed and could not be fetched: {why}")
    return published(collection, cache)


def published(collection: Collection, folder: Path) -> ImageData:
    """The collection as it lies in a folder, every file checked against its sha256."""
    parts = _read_parts(folder, collection.sha256)
    return ImageData(
        name=collection.name,
        licence=collection.licence,
        classes=collection.classes,
        train=parts[0],
        valid=parts[1],
        mirror=collection.mirror,
    )


def fetch(collection: Collection, folder: Path) -> None:
    """Download into `folder` what is not there yet. A file is whole and has the right sha256, or it is not there.

    Raises OSError or http.client.HTTPException where there is no network, no such file, or no place to write to.
    """
    for name, sha256 in collection.sha256.items():
        path = folder / f"{name}.gz"
        if path.exists() or (folder / name).exists():
            continue
        with urllib.request.urlopen(f"{collection.site}/{name}.gz", timeout=DOWNLOAD_SECONDS) as answer:
            packed = answer.read()
        try:
            found = hashlib.sha256(gzip.decompress(packed)).hexdigest()
        except (OSError, EOFError, zlib.error) as error:
            raise OSError(f"{name}.gz came damaged ({error})") from None
        if found != sha256:
            raise OSError(f"{name}.gz came with sha256 {found[:12]}..., not {sha256[:12]}...")
        folder.mkdir(parents=True, exist_ok=True)
        number, temporary = tempfile.mkstemp(dir=folder, prefix=f".{name}.")
        try:
            with os.fdopen(number, "wb") as file:
                file.write(packed)
            os.replace(temporary, path)
        except BaseException:  # also Ctrl-C: no half file may stay
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise


def digits() -> ImageData:
    """scikit-learn's digits: 1,797 grey pictures of 8x8, as people in the year 1998 wrote them."""
    asked = "The pictures were to be scikit-learn's digits."
    loaded = _optional("sklearn.datasets", asked, "pip install 'unisono[recipes]'").load_digits()
    images = torch.from_numpy((loaded.images * 15).astype(np.uint8)).unsqueeze(1)  # they are 0 to 16
    labels = torch.from_numpy(loaded.target.astype(np.int64))
    train, valid = _split([str(i) for i in range(len(labels))], labels.tolist())
    return ImageData(
        name="scikit-learn's digits",
        licence="CC BY 4.0",
        classes=tuple(map(str, range(10))),
        train=ImageSplit(images[train], labels[train]),
        valid=ImageSplit(images[valid], labels[valid]),
    )


# -- idx files: MNIST's format, big-endian; http://yann.lecun.com/exdb/mnist says what is in them


def read_idx(path: Path, sha256: str | None = None) -> Tensor:
    """What is in an idx file of bytes, gzipped or not, as uint8 of its own shape. Raises DataError naming the file."""
    content = _unpacked(path)
    if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256:
        found = hashlib.sha256(content).hexdigest()
        raise _damaged(path, f"Unpacked it has sha256 {found[:12]}..., not {sha256[:12]}....")
    if len(content) < 4 or content[:2] != b"\0\0":
        raise _damaged(path, f"It begins with {content[:4].hex() or 'nothing'}, an idx file with 0000.")
    kind, dims = content[2], content[3]
    if kind != 0x08 or not dims:
        raise _damaged(path, f"It holds numbers of kind {kind:#04x} in {dims} dimensions, not bytes (0x08) in 1 or 3.")
    begin = 4 + 4 * dims
    if len(content) < begin:
        raise _damaged(path, f"It ends after {len(content)} bytes, within its header of {begin}.")
    shape = struct.unpack(f">{dims}I", content[4:begin])
    size = int(np.prod(shape, dtype=object))  # of Python's integers: a damaged shape may be beyond 64 bits
    if len(content) - begin != size:
        told = "x".join(map(str, shape))
        raise _damaged(path, f"It has {len(content) - begin:,} bytes behind its header, which says {told} = {size:,}.")
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=begin).reshape(shape).copy())


def _unpacked(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _damaged(path, f"It cannot be unpacked: {error}.") from None
    except OSError as error:
        raise DataError(
            f"The idx file {path} was to be read.",
            f"It cannot be: {error.strerror or error}.",
            "Check the folder: it needs the four files of an MNIST-like set, readable.",
        ) from None


def _damaged(path: Path, true: str) -> DataError:
    do = "Get the file anew: it is damaged, or of another format."
    return DataError(f"The idx file {path} was to be read.", true, do)


def _read_parts(folder: Path, sha256: Mapping[str, str]) -> tuple[ImageSplit, ImageSplit]:
    """Train and valid from the four idx files of a folder; `sha256` may say what must be in them."""
    paths = [folder / name if (folder / name).exists() else folder / f"{name}.gz" for name in _FILES]
    tensors = [read_idx(path, sha256.get(name)) for name, path in zip(_FILES, paths, strict=True)]
    for path, tensor, dims in zip(paths, tensors, (3, 1, 3, 1), strict=True):
        if tensor.dim() != dims or not tensor.numel():
            told = "x".join(map(str, tensor.shape))
            raise _damaged(path, f"Its shape is {told}; it should have {dims} dimensions, and none of length 0.")
    for i in (0, 2):
        if len(tensors[i]) != len(tensors[i + 1]):
            raise _damaged(paths[i + 1], f"It has {len(tensors[i + 1]):,} labels for {len(tensors[i]):,} pictures.")
    if tensors[0].shape[1:] != tensors[2].shape[1:]:
        sizes = ["x".join(map(str, tensors[i].shape[1:])) for i in (2, 0)]
        raise _damaged(paths[2], f"Its pictures are {sizes[0]}, those to train on {sizes[1]}.")
    if len(tensors[1].unique()) < 2:
        raise _one_class(folder, f"{paths[1].name} has labels of one class only")
    train, valid = (ImageSplit(tensors[i].unsqueeze(1), tensors[i + 1].long()) for i in (0, 2))
    return train, valid


# -- one's own


def _from_folder(folder: Path) -> ImageData:
    """A user's folder: four idx files, or a folder of pictures for every class."""
    folder = folder.expanduser()
    asked = f"The pictures were to come from data={folder}."
    if not folder.is_dir():
        true = "It is a file." if folder.exists() else f"There is no such folder (from {Path.cwd()})."
        raise DataError(asked, true, "--set data=FOLDER, with four idx files or a folder of pictures for every class")
    if any((folder / name).exists() or (folder / f"{name}.gz").exists() for name in _FILES):
        train, valid = _read_parts(folder, {})
        count = int(max(train.labels.max(), valid.labels.max())) + 1
        classes = tuple(map(str, range(count)))
    else:
        classes, train, valid = _read_classes(folder)
    return ImageData(name=str(folder), licence="your own", classes=classes, train=train, valid=valid)


def _read_classes(folder: Path) -> tuple[tuple[str, ...], ImageSplit, ImageSplit]:
    """label/*.png and *.jpg. Which of them are kept for validation depends on their names alone."""
    paths: list[Path] = []
    labels: list[int] = []
    rooms = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if len(rooms) < 2:
        raise _one_class(folder, f"It holds {len(rooms)} folder(s) and no idx files")
    for label, room in enumerate(rooms):
        found = sorted(path for path in room.iterdir() if path.suffix.lower() in _ENDINGS and path.is_file())
        if len(found) < 2:
            raise DataError(
                f"The folder {room} was to hold the pictures of the class {room.name!r}.",
                f"It has {len(found)} files *.png, *.jpg or *.jpeg; a class needs 2, to learn from and to validate on.",
                f"Add pictures, or remove it: rmdir {room}",
            )
        paths += found
        labels += [label] * len(found)
    images = _read_images(paths)
    train, valid = _split([path.relative_to(folder).as_posix() for path in paths], labels)
    numbers = torch.tensor(labels)
    return (
        tuple(room.name for room in rooms),
        ImageSplit(images[train], numbers[train]),
        ImageSplit(images[valid], numbers[valid]),
    )


def _read_images(paths: Sequence[Path]) -> Tensor:
    """uint8 [pictures, channels, height, width]; one channel if all are grey, three otherwise."""
    asked = f"The picture {paths[0]} was to be read."
    opened = _optional("PIL.Image", asked, "pip install pillow").open
    arrays: list[np.ndarray] = []
    for path in paths:
        asked = f"The picture {path} was to be read."
        try:
            with opened(path) as image:
                array = np.asarray(image.convert("L" if image.mode in ("1", "L") else "RGB"))
        except Exception as error:  # what Pillow raises for a damaged file depends on the format
            raise DataError(asked, f"It cannot be: {error}.", "Remove it, or get it anew: it is damaged.") from None
        array = array if array.ndim == 3 else array[:, :, None]
        if arrays and array.shape[:2] != arrays[0].shape[:2]:
            (height, width), (other_height, other_width) = array.shape[:2], arrays[0].shape[:2]
            raise DataError(
                asked,
                f"It is {width}x{height}, and {paths[0]} is {other_width}x{other_height}.",
                f"Make all pictures one size, for instance: mogrify -resize {other_width}x{other_height}! FILES",
            )
        arrays.append(array)
    channels = max(array.shape[2] for array in arrays)
    whole = np.stack([np.repeat(a, channels // a.shape[2], axis=2) for a in arrays])
    return torch.from_numpy(whole).permute(0, 3, 1, 2).contiguous()


def _split(names: Sequence[str], labels: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(train, valid): indices, ascending. Every class gives VALID_SHARE to valid, at least one and not all: those whose
    names have the smallest keyed hashes, which is no order that anybody put them in."""
    valid: list[int] = []
    members: dict[int, list[int]] = {}
    for i, label in enumerate(labels):
        members.setdefault(label, []).append(i)
    for found in members.values():
        share = max(1, round(VALID_SHARE * len(found)))
        valid += sorted(found, key=lambda i: _draw(names[i]))[:share]
    kept = torch.ones(len(names), dtype=torch.bool)
    kept[valid] = False
    return kept.nonzero().flatten(), (~kept).nonzero().flatten()


def _draw(name: str) -> bytes:
    return hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=8, key=b"unisono: validation").digest()


def _one_class(folder: Path, true: str) -> DataError:
    return DataError(
        f"The pictures in {folder} were to be told apart.",
        f"{true}: that is fewer than two classes.",
        "Give it at least two, for instance the folders cats/ and dogs/ with their pictures.",
    )


def _optional(module: str, asked: str, install: str) -> Any:
    """A module of a package that Unisono does without."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # a package that is there but broken may raise anything
        told = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(asked, f"That needs {module}, which cannot be loaded: {told}.", install) from None
