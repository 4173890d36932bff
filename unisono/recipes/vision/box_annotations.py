"""Pictures with boxes around their objects: COCO's JSON files, and a data set of pictures of one size.

    FOLDER/train.json  FOLDER/train/*.jpg      {"images": [{"id", "file_name", "width", "height"}],
    FOLDER/val.json    FOLDER/val/*.jpg         "annotations": [{"image_id", "category_id", "bbox": [x, y, w, h]}],
                                                "categories": [{"id", "name"}]}

https://cocodataset.org/#format-data
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from unisono import DataError
from unisono.recipes.vision.picture_files import (
    SKIP,
    Opened,
    crop,
    pillow,
    read_picture,
    to_tensor,
    without_damaged,
)
from unisono.recipes.vision.picture_transforms import jitter_colors

MOST_ERRORS = 5
"""With more wrong annotations than this, the error reports only the first."""

GRAY = (114, 114, 114)
"""Color of the border beside a picture that is not square."""


@dataclass(frozen=True)
class BoxedPicture:
    """A picture and its objects."""

    path: Path
    boxes: list[list[float]] = field(default_factory=list)
    """left, top, right and bottom of each object, in pixels"""
    labels: list[int] = field(default_factory=list)
    """indices of the classes"""
    size: tuple[float, float] = (math.inf, math.inf)
    """width and height in pixels; infinite: not stated"""


class Annotations(NamedTuple):
    """All pictures of a file, in the order of their numbers."""

    pictures: list[BoxedPicture]
    classes: tuple[str, ...]
    crowds: int
    """boxes around groups of objects, which are left out"""


Sample = tuple[Tensor, Tensor, Tensor]
"""uint8 [3, size, size], float32 [objects, 4] with left, top, right and bottom in pixels, int64 [objects]"""


def read_annotations(path: Path) -> Annotations:
    """Read a JSON file of COCO's format; its pictures are in a folder beside it, with its name.

    Raises:
        DataError: It cannot be read, or annotations are wrong: the message names up to MOST_ERRORS of them.
    """
    try:
        content = json.loads(path.read_bytes())
        categories = sorted((int(each["id"]), str(each["name"])) for each in content["categories"])
        sizes = {
            each["id"]: (float(each.get("width", math.inf)), float(each.get("height", math.inf)))
            for each in content["images"]
        }
        found = {
            each["id"]: BoxedPicture(path.with_suffix("") / each["file_name"], size=sizes[each["id"]])
            for each in content["images"]
        }
        annotations = list(content["annotations"])
    except OSError as error:
        do = "--set data=FOLDER, which has train.json, val.json, and pictures in train/ and val/."
        fact = f"The system reports: {error.strerror}. The current directory is {Path.cwd()}."
        raise DataError(f"Cannot read annotations from {path}.", fact, do) from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        fact = f"It is not in COCO's format: {type(error).__name__}: {error}."
        raise DataError(f"Cannot use {path}.", fact, "It needs images, annotations and categories.") from None
    labels, errors, crowds = {number: label for label, (number, _) in enumerate(categories)}, list[DataError](), 0
    for place, each in enumerate(annotations):
        if problem := _problem(each, labels, sizes):
            errors.append(DataError(f"Annotation {place} of {path} is wrong.", problem, "correct it, or remove it."))
        elif each.get("iscrowd"):
            crowds += 1
        else:
            left, top, width, height = each["bbox"]
            found[each["image_id"]].boxes.append([left, top, left + width, top + height])
            found[each["image_id"]].labels.append(labels[each["category_id"]])
    if errors:
        raise DataError.of([problem for error in errors[:MOST_ERRORS] for problem in error.problems])
    if not any(picture.boxes for picture in found.values()):
        fact = f"It has {len(found)} pictures and {len(annotations)} annotations."
        raise DataError(f"No picture of {path} has an object.", fact, "use another file.")
    return Annotations([found[number] for number in sorted(found)], tuple(name for _, name in categories), crowds)


def _problem(annotation: Any, labels: Mapping[int, int], sizes: Mapping[Any, tuple[float, float]]) -> str:
    """Return what is wrong with an annotation, as a sentence, or an empty text."""
    if not isinstance(annotation, dict):
        return f"It is {str(annotation)[:40]!r}, and must be an object."
    kind, image = annotation.get("category_id"), annotation.get("image_id")
    box = annotation.get("bbox")
    if annotation.get("iscrowd"):
        return ""
    if not isinstance(kind, int) or kind not in labels:
        return f"Its category_id is {kind!r}, and the categories are {', '.join(map(str, labels))}."
    if not isinstance(image, (int, str)) or image not in sizes:
        return f"Its image_id is {image!r}, and no image has this id."
    if not isinstance(box, list) or len(box) != 4 or not all(isinstance(v, (int, float)) for v in box):
        return f"Its bbox is {box!r}, and must be four numbers: x, y, width and height."
    width, height = sizes[image]
    if not (box[2] > 0 and box[3] > 0 and box[0] > -1 and box[1] > -1):
        return f"Its bbox is {box}: width and height must be positive, and x and y not negative."
    if not (box[0] + box[2] < width + 1 and box[1] + box[3] < height + 1):
        return f"Its bbox is {box}, and its picture ends at {width:g} x {height:g}."
    return ""


class BoxedPictures(Dataset[Sample]):
    """Pictures scaled into a square, with their boxes. Pictures are read when they are needed.

    For training, the scale, the position, a horizontal flip and the colors are random.

    Args:
        pictures: The pictures.
        size: Width and height of the square, in pixels.
        jitter: The largest relative change of colors; None: nothing is random.
        skip: Leave out pictures that cannot be read, with a warning, in place of raising DataError.
    """

    def __init__(
        self, pictures: Sequence[BoxedPicture], size: int, *, jitter: float | None = None, skip: bool = False
    ) -> None:
        self.pictures, self.size, self.jitter, self.skip = pictures, size, jitter, skip

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, number: int) -> Sample:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Sample]:
        """Return the samples of a micro-batch, without skipped ones."""
        return without_damaged(numbers, self._read, skip=self.skip)

    def _read(self, number: int) -> Sample:
        picture = self.pictures[number]

        def view(opened: Opened) -> Sample:
            width, height = opened.size
            pixels, boxes = to_square(opened, picture.boxes, self.size, self.jitter)  # raises for a damaged file
            if math.isfinite(sum(picture.size)) and (width, height) != picture.size:
                stated = f"{picture.size[0]:g} x {picture.size[1]:g}"
                facts = f"It has {width} x {height} pixels, and {stated} in its annotation."
                raise DataError(f"The boxes of {picture.path} are of another picture.", facts, "copy the file again.")
            return pixels, boxes, torch.tensor(picture.labels, dtype=torch.int64)

        # Predictions have one row for each picture, so only training can skip.
        return read_picture(picture.path, str(picture.path), view, "" if self.jitter is None else SKIP)


def to_square(
    picture: Opened, boxes: Sequence[Sequence[float]], size: int, jitter: float | None
) -> tuple[Tensor, Tensor]:
    """Scale a picture into a gray square, at the top left, or, with `jitter`, at random.

    Returns:
        uint8 [3, size, size], and the boxes in its pixels: float32 [boxes, 4].
    """
    width, height = picture.size
    scale = size / max(width, height) * (1 if jitter is None else random.uniform(0.7, 1))
    inner = max(1, round(width * scale)), max(1, round(height * scale))
    part = crop(picture, (0, 0, width, height), inner)
    left, top = (0, 0) if jitter is None else (random.randint(0, size - side) for side in inner)
    moved = torch.tensor(boxes, dtype=torch.float32).view(-1, 4)
    moved = moved * torch.tensor([inner[0] / width, inner[1] / height] * 2) + torch.tensor([left, top] * 2)
    square = pillow().new("RGB", (size, size), GRAY)
    square.paste(part, (left, top))
    if jitter is not None:
        if random.random() < 0.5:
            square = square.transpose(pillow().Transpose.FLIP_LEFT_RIGHT)
            moved = torch.stack((size - moved[:, 2], moved[:, 1], size - moved[:, 0], moved[:, 3]), 1)
        square = jitter_colors(square, jitter)
    return to_tensor(square), moved


def pad_boxes(samples: Sequence[Sample], least: int = 1) -> Sample:
    """Collate samples with different numbers of objects: the label -1 fills up to the largest number, or `least`.

    Returns:
        uint8 [batch, 3, size, size], float32 [batch, objects, 4], int64 [batch, objects].
    """
    most = max(least, *(len(labels) for _, _, labels in samples))
    boxes, labels = torch.zeros(len(samples), most, 4), torch.full((len(samples), most), -1)
    for row, (_, of_sample, kinds) in enumerate(samples):
        boxes[row, : len(kinds)], labels[row, : len(kinds)] = of_sample, kinds
    return torch.stack([pixels for pixels, _, _ in samples]), boxes, labels
