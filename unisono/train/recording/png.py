"""Images as PNG files, with zlib (https://www.w3.org/TR/png-3/)."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
import torch

COLOR_TYPES = {1: 0, 3: 2, 4: 6}
"""Color types by the number of channels: gray, RGB, RGBA."""

LEVEL = 1
"""Of compression. With level 6, a smooth image takes nine times as long, for a file of half the size."""


def pixels_of(image: Any) -> np.ndarray[Any, Any]:
    """Return an image as uint8[height, width, channels] in the CPU's memory.

    Args:
        image: an array or tensor [H, W], [H, W, C] or [C, H, W] with 1, 3 or 4 channels. uint8, bool (white: True), or
            floating point from 0 to 1; values outside are cut off, and nan is 0. If both the first and the last
            dimension may be channels, the last one is.

    Raises:
        ValueError: the shape or the type is another one.
    """
    array = array_of(image)
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim == 3 and array.shape[2] not in COLOR_TYPES:
        array = array.transpose(1, 2, 0)
    if array.ndim != 3 or array.shape[2] not in COLOR_TYPES or not array.size:
        raise ValueError(f"An image is [H, W], [H, W, C] or [C, H, W] with 1, 3 or 4 channels, not {_shape(image)}.")
    if array.dtype == np.bool_:
        return np.asarray(array, np.uint8) * np.uint8(255)
    if array.dtype.kind == "f":
        return np.rint(np.clip(np.nan_to_num(array, nan=0.0), 0.0, 1.0) * 255).astype(np.uint8)
    if array.dtype != np.uint8:
        raise ValueError(f"The values of an image are uint8, or floating point from 0 to 1, not {array.dtype}.")
    return array


def encode_png(pixels: np.ndarray[Any, Any]) -> bytes:
    """Return uint8[height, width, channels] as a PNG file."""
    height, width, channels = pixels.shape
    lines = np.empty((height, 1 + width * channels), np.uint8)
    lines[:, 0] = 1  # the filter Sub: a byte is the difference to the same channel of the pixel on its left
    rows = lines[:, 1:].reshape(height, width, channels)
    rows[:, 0] = pixels[:, 0]
    np.subtract(pixels[:, 1:], pixels[:, :-1], out=rows[:, 1:])
    header = struct.pack(">IIBBBBB", width, height, 8, COLOR_TYPES[channels], 0, 0, 0)
    data = zlib.compress(lines.tobytes(), LEVEL)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def array_of(values: Any) -> np.ndarray[Any, Any]:
    """Return values as an array in the CPU's memory; small floating types become float32.

    Raises:
        ValueError: a tensor is divided over processes.
    """
    if not isinstance(values, torch.Tensor):
        return np.asarray(values)
    if hasattr(values, "full_tensor"):
        raise ValueError("The tensor is divided over processes. Log tensor.full_tensor(), which all processes call.")
    values = values.detach().cpu()
    return (values.float() if values.is_floating_point() and values.dtype != torch.float64 else values).numpy()


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def _shape(image: Any) -> list[int]:
    return list(np.shape(image) if not isinstance(image, torch.Tensor) else image.shape)
