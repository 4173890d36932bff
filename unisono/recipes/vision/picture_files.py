"""Read pictures in any format and mode that Pillow reads, and name those that cannot be read.

A picture is opened, and decoded only after its crop is known: a JPEG file is then decoded at a half, a quarter or an
eighth of its size if that is enough.
"""

from __future__ import annotations

import io
import logging
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from unisono import DataError

T = TypeVar("T")
Opened = Any
"""A picture of Pillow that is open, and not decoded."""
Box = tuple[float, float, float, float]
"""left, top, right and bottom, in pixels"""

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".tif", ".tiff"})
SKIP = "skip damaged samples: --set loader.on_error=skip"

_log = logging.getLogger(__name__)


def pillow() -> Any:
    """Return the module PIL.Image.

    Raises:
        DataError: It is not installed, or does not work.
    """
    try:
        from PIL import Image
    except Exception as error:  # a broken package may raise any exception
        raise DataError("Cannot read pictures without Pillow.", str(error), "pip install 'unisono[image]'") from None
    return Image


def read_picture(source: Path | bytes, name: str, use: Callable[[Opened], T], remedy: str = "") -> T:
    """Open a picture and return `use(picture)`, which decodes it.

    Args:
        source: A file, or its content.
        name: The picture in messages.
        use: The function.
        remedy: What else to do about a damaged picture.

    Raises:
        DataError: The picture cannot be read. It names the picture and says why.
    """
    image = pillow()
    try:
        with image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as opened:
            return use(opened)
    except DataError:
        raise
    except Exception as error:  # the type of Pillow's error depends on the file format
        fact, do = _reason(source, error)
        more = f", or {remedy}" if remedy else ""
        # What Pillow raises for damaged files needs no traceback; anything else may be a mistake in `use`.
        cause = None if isinstance(error, OSError | SyntaxError | EOFError) else error
        raise DataError(f"Cannot read the picture {name}.", fact, f"{do}{more}") from cause


def _reason(source: Path | bytes, error: Exception) -> tuple[str, str]:
    """Return the reason as a sentence, and what to do."""
    path = shlex.quote(str(source)) if isinstance(source, Path) else ""
    remove = f"copy it again, or: rm {path}" if path else "write the tar again without it"
    if isinstance(error, PermissionError):
        return "This user has no permission to read it.", f"chmod a+r {path}"
    if isinstance(error, FileNotFoundError):
        return "The file is gone, or is a link to nothing.", f"copy it again, or: rm -f {path}"
    if isinstance(error, pillow().UnidentifiedImageError):
        content = source if isinstance(source, bytes) else source.read_bytes()
        begins = f"begins with {content[:8]!r}" if content else "is empty"
        return f"It is no picture: it has {len(content):,} bytes and {begins}.", remove
    return f"Pillow reports: {str(error) or type(error).__name__}.", remove


def to_rgb(picture: Opened) -> Any:
    """Decode a picture of any mode to RGB: gray, 16 bits, palette, CMYK. What is transparent becomes white."""
    if picture.mode.startswith("I"):  # 16 bits and more; Pillow would clip instead of divide
        pixels = np.clip(np.asarray(picture).astype(np.int64) >> 8, 0, 255).astype(np.uint8)
        return pillow().fromarray(pixels).convert("RGB")
    if "A" in picture.getbands() or "transparency" in picture.info:
        picture = picture.convert("RGBA")
        return pillow().alpha_composite(pillow().new("RGBA", picture.size, "white"), picture).convert("RGB")
    return picture.convert("RGB")


def crop(picture: Opened, box: Box, size: tuple[int, int]) -> Any:
    """Decode a picture, and return a part of it as RGB of another size, (width, height)."""
    width, height = picture.size
    left, top, right, bottom = box
    wanted = (int(np.ceil(width * size[0] / (right - left))), int(np.ceil(height * size[1] / (bottom - top))))
    picture.draft(None, wanted)  # of the formats only JPEG has this
    x, y = picture.size[0] / width, picture.size[1] / height
    part = (left * x, top * y, min(right * x, picture.size[0]), min(bottom * y, picture.size[1]))
    return to_rgb(picture).resize(size, pillow().Resampling.BILINEAR, box=part, reducing_gap=2.0)


def to_tensor(picture: Any) -> Tensor:
    """Return an RGB picture as uint8 [3, height, width]."""
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()


def without_damaged(numbers: Sequence[int], read: Callable[[int], T], *, skip: bool) -> list[T]:
    """Return `read(number)` for each number, without damaged ones.

    Which samples are left out depends on the data alone, so it is the same on any placement.

    Args:
        numbers: Of the samples of a micro-batch.
        read: Raises DataError for a damaged one.
        skip: Leave damaged ones out, with a warning. False: raise the error.

    Raises:
        DataError: A sample is damaged and `skip` is false, or all are.
    """
    found = []
    for number in numbers:
        try:
            found.append(read(number))
        except DataError as error:
            if not skip:
                raise
            problem = error.problems[0]
            _log.warning("Skipped sample %d: %s %s", number, problem.error, problem.facts)
    if not found:
        raise DataError(
            f"All {len(numbers)} samples of a micro-batch are damaged.",
            "A micro-batch cannot be empty. The log has a line for each of them.",
            "repair the files, or leave them out.",
        )
    return found


@dataclass(frozen=True)
class TarPicture:
    """The function of a sample of a tar file: (picture, label).

    Attributes:
        use: Decodes an open picture.
        classes: The number of classes: labels are from 0 to classes - 1.
        indexed: Whether the number is from an index, and no setting.
    """

    use: Callable[[Opened], Tensor]
    classes: int
    indexed: bool = False

    def __call__(self, sample: Mapping[str, Any]) -> tuple[Tensor, int]:
        """Return the picture and the label of a sample.

        Raises:
            DataError: It has no picture or no label, the picture is damaged, or the label is out of range.
        """
        name = str(sample["__key__"])
        suffix = next((each for each in sample if f".{each.lower()}" in SUFFIXES), None)
        if suffix is None or "cls" not in sample:
            has = ", ".join(each for each in sample if each != "__key__")
            lacks = "label (.cls)" if suffix else f"picture ({', '.join(sorted(SUFFIXES))})"
            raise DataError(f"The sample {name} has no {lacks}.", f"It has {has}.", f"write the tar again, or {SKIP}")
        label = sample["cls"]
        if not 0 <= label < self.classes:
            do = f"--set classes={label + 1}" if label >= 0 else "write the tar again"
            raise DataError(
                f"The label {label} of the sample {name} is out of range.",
                f"There are {self.classes} classes: labels are from 0 to {self.classes - 1}.",
                f"{'unisono shards FOLDER OUT --force' if self.indexed else do}, or {SKIP}",
            )
        return read_picture(sample[suffix], f"{name}.{suffix}", self.use, SKIP), label
