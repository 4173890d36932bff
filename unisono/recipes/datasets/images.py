"""Labeled images for the image recipe: a user's folder, Fashion-MNIST, or the digits of scikit-learn.

Fashion-MNIST (Xiao, Rasul, Vollgraf, arXiv 1708.07747) has 70,000 grayscale images of clothes, 28x28, in ten classes:
as many as MNIST, and harder to classify. The sha256 of its four files is checked, so each source gives the same run.
The digits of scikit-learn are 1,797 images of 8x8 and need no download.
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
from unisono.recipes.datasets.class_folders import files_by_class, files_of
from unisono.recipes.datasets.held_out import held_out

Source = Literal["auto", "fashion", "digits"]

VALID_SHARE = 0.2
"""The fraction of each class for validation, if the data set has no validation set of its own."""

DOWNLOAD_SECONDS = 5.0
"""Timeout of a download while the site sends nothing."""

_SUFFIXES = {".png", ".jpg", ".jpeg"}
_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


@dataclass(frozen=True, kw_only=True)
class IdxDataset:
    """A published data set of four idx files: where to get it, and the hashes of its files."""

    name: str
    license: str
    classes: tuple[str, ...]
    mirror: bool
    """A horizontal flip does not change an image's class."""
    site: str
    """The URL of the folder that has the files, as NAME.gz."""
    folder: Path
    """Where a system package installs the files."""
    cache: str
    """The name of the folder in ~/.cache/unisono for downloaded files."""
    sha256: Mapping[str, str]
    """The hash of each file after decompression: mirrors compress the same files in different ways."""


FASHION = IdxDataset(
    name="Fashion-MNIST",
    license="MIT",
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
    """Images with their labels."""

    images: Tensor
    """uint8 [images, channels, height, width]"""
    labels: Tensor
    """int64 [images], indices of classes"""

    def first(self, count: int | None) -> ImageSplit:
        """Return the first `count` images; None: all."""
        return ImageSplit(self.images[:count], self.labels[:count])


@dataclass(frozen=True, kw_only=True)
class ImageData:
    """Labeled images of one shape, for training and validation."""

    name: str
    license: str
    classes: tuple[str, ...]
    train: ImageSplit
    valid: ImageSplit
    mirror: bool = False
    """A horizontal flip does not change an image's class: true for a shoe, false for a digit."""
    fallback_reason: str = ""
    """Why the preferred data set is not used."""
    digest: str = field(init=False)
    """The first 12 digits of the sha256 over all images and labels: equal digests, equal data."""

    def __post_init__(self) -> None:
        digest = hashlib.sha256()
        for tensor in (*self.train, *self.valid):
            digest.update(f"{tuple(tensor.shape)}\0".encode())
            digest.update(tensor.contiguous().numpy().data)
        object.__setattr__(self, "digest", digest.hexdigest()[:12])

    def summary(self) -> str:
        """Return name, size, license and digest, in one line."""
        channels, height, width = self.train.images.shape[1:]
        return (
            f"{self.name}: {len(self.train.labels):,} images for training, {len(self.valid.labels):,} for validation, "
            f"{height}x{width}x{channels}, {len(self.classes)} classes, license {self.license}, digest {self.digest}"
            + (f" ({self.fallback_reason})" if self.fallback_reason else "")
        )


def load_images(source: Source = "auto", data: Path | None = None, *, published: IdxDataset = FASHION) -> ImageData:
    """Load labeled images. It takes less than two seconds if they are on the disk.

    Args:
        source: "fashion" (`published`, from the system package, the cache, or the site), "digits" (of scikit-learn), or
            "auto": the first of these that is available.
        data: A folder with four idx files, or with one folder of PNG or JPEG files per class (needs Pillow).
        published: The data set of the source "fashion".

    Raises:
        DataError: The data is missing, damaged, or has fewer than two classes. Damaged data is never replaced by
            another source.
    """
    if data is not None:
        if source != "auto":
            raise DataError(
                f"Cannot load images from both source={source} and data={data}.",
                "Only one of the two can be used.",
                f"--set source=auto to use {data}, or --set data=none",
            )
        return _load_folder(data.expanduser())
    if source == "digits":
        return load_digits()
    if published.folder.is_dir():
        return load_published(published, published.folder)
    cache = Path.home() / ".cache" / "unisono" / published.cache
    try:
        download(published, cache)
    except (OSError, http.client.HTTPException) as error:
        reason = str(error) or type(error).__name__
        if source == "fashion":
            raise DataError(
                f"Cannot download {published.name} from {published.site}.",
                f"The download failed ({reason}), and it is not installed in {published.folder}.",
                f"apt install dataset-fashion-mnist, or copy its files to {cache}, or --set source=digits",
            ) from None
        fallback_reason = f"{published.name} is not installed and could not be downloaded: {reason}"
        return replace(load_digits(), fallback_reason=fallback_reason)
    return load_published(published, cache)


def load_published(published: IdxDataset, folder: Path) -> ImageData:
    """Load a published data set from a folder, and check the sha256 of each file."""
    train, valid = _read_idx_files(folder, published.sha256)
    return ImageData(
        name=published.name,
        license=published.license,
        classes=published.classes,
        train=train,
        valid=valid,
        mirror=published.mirror,
    )


def download(published: IdxDataset, folder: Path) -> None:
    """Download missing files into `folder`. A file is stored only if it is complete and its sha256 is right.

    Raises:
        OSError: The network, the file or the folder is unavailable, or the file is damaged.
        http.client.HTTPException: The response is invalid.
    """
    for name, sha256 in published.sha256.items():
        path = folder / f"{name}.gz"
        if path.exists() or (folder / name).exists():
            continue
        with urllib.request.urlopen(f"{published.site}/{name}.gz", timeout=DOWNLOAD_SECONDS) as response:
            compressed = response.read()
        try:
            found = hashlib.sha256(gzip.decompress(compressed)).hexdigest()
        except (OSError, EOFError, zlib.error) as error:
            raise OSError(f"the downloaded {name}.gz is damaged ({error})") from None
        if found != sha256:
            raise OSError(f"the downloaded {name}.gz has sha256 {found[:12]}..., not {sha256[:12]}...")
        folder.mkdir(parents=True, exist_ok=True)
        _write_atomically(path, compressed)


def _write_atomically(path: Path, content: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:  # Ctrl-C, too, must not leave a partial file
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def load_digits() -> ImageData:
    """Load the digits of scikit-learn: 1,797 grayscale images of 8x8, handwritten in 1998."""
    sklearn = _import_optional("sklearn.datasets", "Cannot load the digits of scikit-learn", "'unisono[image]'")
    dataset = sklearn.load_digits()
    images = torch.from_numpy((dataset.images * 15).astype(np.uint8)).unsqueeze(1)  # pixels are from 0 to 16
    labels = torch.from_numpy(dataset.target.astype(np.int64))
    train, valid = _split(images, labels, [str(i) for i in range(len(labels))])
    return ImageData(
        name="scikit-learn's digits",
        license="CC BY 4.0",
        classes=tuple(map(str, range(10))),
        train=train,
        valid=valid,
    )


# -- idx files: MNIST's format, big-endian, described at http://yann.lecun.com/exdb/mnist


def read_idx(path: Path, sha256: str | None = None) -> Tensor:
    """Read an idx file of bytes, compressed or not, as uint8 of the shape in its header.

    Raises:
        DataError: The file is missing, damaged, or has another format or sha256.
    """
    content = _decompress(path)
    if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256:
        found = hashlib.sha256(content).hexdigest()
        raise _damaged(path, f"After decompression its sha256 is {found[:12]}..., not {sha256[:12]}....")
    if len(content) < 4 or content[:2] != b"\0\0":
        raise _damaged(path, f"It begins with {content[:4].hex() or 'nothing'}; an idx file begins with 0000.")
    dtype, dims = content[2], content[3]
    if dtype != 0x08 or not dims:
        raise _damaged(path, f"It has numbers of type {dtype:#04x} in {dims} dimensions, not bytes (0x08) in 1 or 3.")
    start = 4 + 4 * dims
    if len(content) < start:
        raise _damaged(path, f"It ends after {len(content)} bytes, in its header of {start} bytes.")
    shape = struct.unpack(f">{dims}I", content[4:start])
    size = int(np.prod(shape, dtype=object))  # Python integers: the size in a damaged header may exceed 64 bits
    if len(content) - start != size:
        found = f"{len(content) - start:,} bytes after its header"
        raise _damaged(path, f"It has {found}, which gives {_format_shape(shape)} = {size:,}.")
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy())


def _decompress(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _damaged(path, f"It cannot be decompressed: {error}.") from None
    except OSError as error:
        raise DataError(
            f"Cannot read the idx file {path}.",
            f"The system reports: {error.strerror or error}.",
            "Check the folder: it needs the four files of an MNIST-like data set, with permission to read them.",
        ) from None


def _damaged(path: Path, fact: str) -> DataError:
    return DataError(f"Cannot read the idx file {path}.", fact, "Copy the file again: it is damaged.")


def _format_shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _read_idx_files(folder: Path, sha256: Mapping[str, str]) -> tuple[ImageSplit, ImageSplit]:
    """Read the training and the validation set from four idx files, and check those hashes that are given."""
    paths = [folder / name if (folder / name).exists() else folder / f"{name}.gz" for name in _FILES]
    tensors = [read_idx(path, sha256.get(name)) for name, path in zip(_FILES, paths, strict=True)]
    for path, tensor, dims in zip(paths, tensors, (3, 1, 3, 1), strict=True):
        if tensor.dim() != dims or not tensor.numel():
            shape = _format_shape(tensor.shape)
            raise _damaged(path, f"Its shape is {shape}; it must have {dims} dimensions, and none of length 0.")
    for i in (0, 2):
        if len(tensors[i]) != len(tensors[i + 1]):
            raise _damaged(paths[i + 1], f"It has {len(tensors[i + 1]):,} labels for {len(tensors[i]):,} images.")
    if tensors[0].shape[1:] != tensors[2].shape[1:]:
        valid_size, train_size = (_format_shape(tensors[i].shape[1:]) for i in (2, 0))
        raise _damaged(paths[2], f"Its images are {valid_size}, and the training images {train_size}.")
    if len(tensors[1].unique()) < 2:
        raise DataError(
            f"Cannot train on {folder}: it has fewer than two classes.",
            f"All labels in {paths[1].name} are equal.",
            "Use a data set of two or more classes.",
        )
    train, valid = (ImageSplit(tensors[i].unsqueeze(1), tensors[i + 1].long()) for i in (0, 2))
    return train, valid


# -- a user's folder


def _load_folder(folder: Path) -> ImageData:
    """Load four idx files, or one folder of images per class."""
    if any((folder / name).exists() or (folder / f"{name}.gz").exists() for name in _FILES):
        train, valid = _read_idx_files(folder, {})
        count = int(max(train.labels.max(), valid.labels.max())) + 1
        classes = tuple(map(str, range(count)))
    else:
        files = files_by_class(folder, "images", _SUFFIXES, hint="It has no idx files either.")
        classes = tuple(files)
        paths = [path for paths in files.values() for path in paths]
        labels = torch.tensor([label for label, name in enumerate(classes) for _ in files[name]])
        train, valid = _split(read_images(paths), labels, [path.relative_to(folder).as_posix() for path in paths])
    return ImageData(name=str(folder), license="your own", classes=classes, train=train, valid=valid)


def image_files(path: Path) -> list[Path]:
    """Return an image file, or those of a folder, sorted by name."""
    return files_of(path, "images", _SUFFIXES)


def read_images(paths: Sequence[Path]) -> Tensor:
    """Read images of one size as uint8 [images, channels, height, width]; 1 channel if all are grayscale, else 3."""
    pillow = _import_optional("PIL.Image", f"Cannot read the image {paths[0]}", "'unisono[image]'")
    arrays: list[np.ndarray] = []
    for path in paths:
        try:
            with pillow.open(path) as image:
                array = np.asarray(image.convert("L" if image.mode in ("1", "L") else "RGB"))
        except Exception as error:  # the type of Pillow's error depends on the file format
            raise DataError(
                f"Cannot read the image {path}.", f"Pillow reports: {error}.", "Remove it, or copy it again."
            ) from None
        array = array if array.ndim == 3 else array[:, :, None]
        if arrays and array.shape[:2] != arrays[0].shape[:2]:
            (height, width), (first_height, first_width) = array.shape[:2], arrays[0].shape[:2]
            raise DataError(
                f"Cannot use the image {path}: it has another size.",
                f"It is {width}x{height}, and {paths[0]} is {first_width}x{first_height}.",
                f"Resize all images to one size, for instance: mogrify -resize {first_width}x{first_height}! FILES",
            )
        arrays.append(array)
    channels = max(array.shape[2] for array in arrays)
    stacked = np.stack([np.repeat(a, channels // a.shape[2], axis=2) for a in arrays])
    return torch.from_numpy(stacked).permute(0, 3, 1, 2).contiguous()


def _split(images: Tensor, labels: Tensor, names: Sequence[str]) -> tuple[ImageSplit, ImageSplit]:
    """Split into training and validation. VALID_SHARE of each class, chosen by a hash of the names, is held out."""
    by_class: dict[int, list[str]] = {}
    for name, label in zip(names, labels.tolist(), strict=True):
        by_class.setdefault(label, []).append(name)
    held = set[str]().union(*(held_out(members, VALID_SHARE, "unisono: validation") for members in by_class.values()))
    valid = torch.tensor([name in held for name in names])
    return ImageSplit(images[~valid], labels[~valid]), ImageSplit(images[valid], labels[valid])


def _import_optional(module: str, error: str, package: str) -> Any:
    """Import a module of an optional package."""
    try:
        return importlib.import_module(module)
    except Exception as exception:  # a broken package may raise any exception
        reason = str(exception).splitlines()[0] if str(exception) else type(exception).__name__
        raise DataError(f"{error}: {module} cannot be imported.", reason, f"pip install {package}") from None
