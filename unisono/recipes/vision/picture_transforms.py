"""From an open picture of any size to a tensor of one size: random for training, fixed for evaluation.

Random numbers are from Python's global generator, which a run seeds for each micro-batch. So the result does not depend
on the process or loader worker that reads the picture.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from torch import Tensor

from unisono.recipes.vision.picture_files import Box, Opened, crop, pillow, to_tensor

MARGIN = 0.875
"""The part of a picture's shorter side that evaluation looks at: 224 of 256 pixels, as in most papers on ImageNet."""


@dataclass(frozen=True)
class RandomView:
    """Cut out a random part of a picture, resize it, flip it and change its colors, each at random.

    Attributes:
        size: Width and height of the result in pixels.
        least: The least part of the picture's area (arXiv 1409.4842).
        jitter: The largest relative change of brightness, contrast and saturation.
    """

    size: int
    least: float = 0.08
    jitter: float = 0.4

    def __call__(self, picture: Opened) -> Tensor:
        """Return uint8 [3, size, size]."""
        width, height = picture.size
        part = crop(picture, random_box(width, height, self.least), (self.size, self.size))
        if random.random() < 0.5:
            part = part.transpose(pillow().Transpose.FLIP_LEFT_RIGHT)
        return to_tensor(jitter_colors(part, self.jitter))


@dataclass(frozen=True)
class CenterView:
    """Cut out the center of a picture, and resize it.

    Attributes:
        size: Width and height of the result in pixels.
    """

    size: int

    def __call__(self, picture: Opened) -> Tensor:
        """Return uint8 [3, size, size]."""
        width, height = picture.size
        half = min(width, height) * MARGIN / 2
        box = (width / 2 - half, height / 2 - half, width / 2 + half, height / 2 + half)
        return to_tensor(crop(picture, box, (self.size, self.size)))


def random_box(width: int, height: int, least: float) -> Box:
    """Draw a part of a picture of this size: `least` to 1 of its area, with sides in a ratio from 3:4 to 4:3.

    In a picture that is too narrow for ten draws, the part is as large as the ratio allows, in the center.
    """
    for _ in range(10):
        area = width * height * random.uniform(least, 1)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if w <= width and h <= height:
            left, top = random.uniform(0, width - w), random.uniform(0, height - h)
            return left, top, left + w, top + h
    w, h = min(width, height * 4 / 3), min(height, width * 4 / 3)
    return (width - w) / 2, (height - h) / 2, (width + w) / 2, (height + h) / 2


def jitter_colors(picture: Opened, most: float) -> Opened:
    """Change brightness, contrast and saturation of an RGB picture, each by its own random factor."""
    from PIL import ImageEnhance

    if most:
        for kind in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
            picture = kind(picture).enhance(random.uniform(1 - most, 1 + most))
    return picture
