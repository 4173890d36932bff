"""Training and validation pictures from folders, shards or tar files. They are read when needed, and not kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from unisono import DataError, SettingsError, ShardCache, Stream
from unisono.recipes.vision.drawn_shapes import MOST_CLASSES, cached, write_classes
from unisono.recipes.vision.picture_files import (
    SKIP,
    Opened,
    TarPicture,
    pillow,
    read_picture,
    without_damaged,
)
from unisono.recipes.vision.picture_index import PictureIndex, index_pictures

View = Callable[[Opened], Tensor]

INDEXES = ("index.json", "train/index.json")
"""Files that `unisono shards` has written: a folder with one of them has shards."""


@dataclass(frozen=True)
class PictureSets:
    """A training and a validation set. A sample is (uint8 [3, height, width], label)."""

    train: Dataset[tuple[Tensor, int]]
    valid: Dataset[tuple[Tensor, int]]
    classes: tuple[str, ...]
    """Names of the classes, or their numbers."""
    summary: str
    """What was found, in one line."""


class PictureFolder(Dataset[tuple[Tensor, int]]):
    """Pictures in folders of classes, each read when it is needed.

    Args:
        index: The files.
        view: Decodes an open picture.
        skip: Leave out pictures that cannot be read, with a warning, in place of raising DataError.
        numbers: The files that belong to the set; None: all.
    """

    def __init__(
        self, index: PictureIndex, view: View, *, skip: bool = False, numbers: np.ndarray[Any, Any] | None = None
    ) -> None:
        self.index, self.view, self.skip, self.numbers = index, view, skip, numbers

    def __len__(self) -> int:
        return len(self.index if self.numbers is None else self.numbers)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[tuple[Tensor, int]]:
        """Return the pictures of a micro-batch, without skipped ones."""
        return without_damaged(numbers, self._read, skip=self.skip)

    def _read(self, number: int) -> tuple[Tensor, int]:
        number = number if self.numbers is None else int(self.numbers[number])
        path = self.index.path(number)
        return read_picture(path, str(path), self.view, SKIP), int(self.index.labels[number])


@dataclass(frozen=True)
class Relabeled:
    """The function of a sample of shards whose classes have other numbers in the training set.

    Attributes:
        use: Returns a picture and its label.
        labels: The label in the training set of each class.
    """

    use: TarPicture
    labels: tuple[int, ...]

    def __call__(self, sample: Mapping[str, Any]) -> tuple[Tensor, int]:
        """Return the picture and the label of a sample."""
        picture, label = self.use(sample)
        return picture, self.labels[label]


class PictureFiles(Dataset[tuple[Tensor, int]]):
    """Pictures without labels, with their numbers in place of them.

    Args:
        files: The pictures.
        view: Decodes an open picture.
    """

    def __init__(self, files: Sequence[Path], view: View) -> None:
        self.files, self.view = files, view

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return read_picture(self.files[number], str(self.files[number]), self.view), number


def load_sets(
    data: str | None,
    valid: str | None,
    views: tuple[View, View],
    *,
    classes: int | None,
    window: int,
    skip: bool,
    drawn: int,
    cache: ShardCache | None = None,
) -> PictureSets:
    """Find the pictures for training and validation.

    Args:
        data: A folder with one folder per class, or with such folders in train/ and val/; or shards of `unisono shards`
            in such folders or at a URL; or tar files. None: pictures are drawn, once.
        valid: A folder with one folder per class, shards, or tar files. None: val/, or a part of the training pictures.
        views: Decode a picture for training and for validation.
        classes: The number of classes in tar files, or of those to draw.
        window: How far samples of shards and tar files are shuffled.
        skip: Leave out damaged pictures, with a warning.
        drawn: The number of pictures to draw for training.
        cache: Keeps shards at URLs on a local disk.

    Raises:
        SettingsError: Settings do not fit together.
        DataError: There are no such pictures.
    """
    pillow()  # is it installed?
    if data is not None and (".tar" in data or data.endswith(".tgz")):
        return _tar_sets(data, valid, views, classes, window, cache)
    if data is not None and ("://" in data or any((Path(data).expanduser() / i).is_file() for i in INDEXES)):
        return _indexed_sets(data, valid, views, classes, window, cache)
    if data is None:
        count = 20 if classes is None else classes
        if not 2 <= count <= MOST_CLASSES:
            error = f"Cannot draw pictures of {count} classes."
            raise SettingsError(error, f"There are 2 to {MOST_CLASSES}.", "--set classes=20, or --set data=FOLDER")
        write = partial(write_classes, pictures=drawn, classes=count, valid=max(count, drawn // 5))
        data = str(cached(f"{drawn}-of-{count}", write))
    elif classes is not None:
        error, fact = f"Cannot use classes={classes} with the folder {data}.", "Its folders are its classes."
        raise SettingsError(error, fact, "--set classes=none")
    return _folder_sets(Path(data).expanduser(), valid, views, skip)


def _folder_sets(folder: Path, valid: str | None, views: tuple[View, View], skip: bool) -> PictureSets:
    known = folder / "train" if (folder / "train").is_dir() else folder
    other = Path(valid).expanduser() if valid is not None else folder / "val"
    train = index_pictures(known)
    if valid is None and (known is folder or not other.is_dir()):
        if train.held.all() or not train.held.any():
            raise DataError(
                f"{known} has too few pictures for a validation set.",
                f"It has {len(train)} in {len(train.classes)} classes, and no class has two.",
                f"put others into {other}, or add pictures.",
            )
        first = PictureFolder(train, views[0], skip=skip, numbers=np.flatnonzero(~train.held))
        second = PictureFolder(train, views[1], skip=skip, numbers=np.flatnonzero(train.held))
    else:
        held = _with_classes_of(train, index_pictures(other))
        first, second = PictureFolder(train, views[0], skip=skip), PictureFolder(held, views[1], skip=skip)
    ignored = f", {train.ignored:,} other files ignored" if train.ignored else ""
    summary = f"{len(first):,} pictures for training, {len(second):,} for validation, {len(train.classes)} classes"
    return PictureSets(first, second, train.classes, f"{folder}: {summary}{ignored}")


def _with_classes_of(train: PictureIndex, valid: PictureIndex) -> PictureIndex:
    """Return the validation pictures with the labels of the training set, whose classes may be more."""
    places = valid.folder, train.folder
    do = f"mkdir {places[1]}/CLASS, and put pictures there, or: rm -r {places[0]}/CLASS"
    numbers = _labels_of(valid.classes, train.classes, places, do)
    return replace(valid, classes=train.classes, labels=np.array(numbers, np.int32)[valid.labels])


def _labels_of(held: Sequence[str], known: Sequence[str], places: tuple[object, object], do: str) -> tuple[int, ...]:
    """Return the label in the training set of each class of the validation set.

    Args:
        held: The classes of the validation set.
        known: The classes of the training set.
        places: Where the validation set and the training set are.
        do: What to do about a class that only the validation set has, with CLASS in place of its name.
    """
    unknown = [name for name in held if name not in known]
    if unknown:
        raise DataError(
            f"{places[0]} has the class {unknown[0]}, and {places[1]} does not.",
            f"{len(unknown)} of its {len(held)} classes are not among the {len(known)} for training.",
            do.replace("CLASS", unknown[0]),
        )
    return tuple(map(list(known).index, held))


def _indexed_sets(
    data: str, valid: str | None, views: tuple[View, View], classes: int | None, window: int, cache: ShardCache | None
) -> PictureSets:
    if classes is not None:
        error, fact = f"Cannot use classes={classes} with the shards in {data}.", "Their index names the classes."
        raise SettingsError(error, fact, "--set classes=none")
    folder = Path(data).expanduser()
    known = data if "://" in data else str(folder)
    if (folder / INDEXES[1]).is_file():
        known, valid = str(folder / "train"), valid or str(folder / "val")
    if valid is None:
        error, fact = "Shards need the setting valid.", f"The shards in {data} have no part for validation."
        raise SettingsError(error, fact, "--set valid=SHARDS, written by: unisono shards FOLDER SHARDS")
    train, held = (
        Stream.indexed(url if "://" in url else Path(url).expanduser(), window=window, cache=cache)
        for url in (known, valid)
    )
    for stream, url in ((train, known), (held, valid)):
        if not stream.classes:
            error, fact = f"The shards in {url} have no classes.", "They were not written from one folder per class."
            raise DataError(error, fact, "unisono shards FOLDER OUT --form classes")
    train.map = TarPicture(views[0], len(train.classes), indexed=True)
    do = f"rm -r FOLDER/CLASS, and write the others again: unisono shards FOLDER {valid} --force"
    labels = _labels_of(held.classes, train.classes, (valid, known), do)
    held.map = Relabeled(TarPicture(views[1], len(labels), indexed=True), labels)
    shards = f"{len(train.shards.names)} shards for training, {len(held.shards.names)} for validation"
    summary = f"{len(train):,} pictures in {shards} ({len(held):,}), {len(train.classes)} classes"
    return PictureSets(train, held, tuple(train.classes), f"{data}: {summary}")


def _tar_sets(
    data: str, valid: str | None, views: tuple[View, View], classes: int | None, window: int, cache: ShardCache | None
) -> PictureSets:
    if valid is None or classes is None:
        missing = "valid" if valid is None else "classes"
        do = "--set valid='val-{0..9}.tar'" if valid is None else "--set classes=1000"
        what = "A tar file has no part for validation." if valid is None else "A label in a tar file is a number."
        raise SettingsError(f"Tar files need the setting {missing}.", what, do)
    train, held = (
        Stream.tar(urls, window=window, map=TarPicture(view, classes), cache=cache)
        for urls, view in zip((data, valid), views, strict=True)
    )
    names = tuple(map(str, range(classes)))
    counts = f"{len(train.shards.names)} tar files for training, {len(held.shards.names)} for validation"
    return PictureSets(train, held, names, f"{data}: {counts}, {classes} classes")
