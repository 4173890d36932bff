"""Draw pictures of shapes with labels, as JPEG files of many sizes: data of any amount to try image training with.

    python -m unisono.recipes.vision.drawn_shapes FOLDER --pictures 200000 --classes 100       2 to 4 kB a file
    python -m unisono.recipes.vision.drawn_shapes FOLDER --pictures 2000 --scenes              several shapes a picture

A class is a shape with a texture (`star-rows`). Position, size, angle, colors, background and noise are random. Equal
arguments give equal files, with the same version of Pillow. Pictures of classes are in train/CLASS and val/CLASS;
scenes are in train and val, and train.json and val.json have their boxes in COCO's format.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from unisono import DataError, cache_folder
from unisono.recipes.vision.picture_files import pillow

Array = np.ndarray[Any, np.dtype[Any]]
Plane = Callable[[Array, Array], Array]
"""A function of x and y, each [height, width]: of a shape it is true inside; of a texture it is from 0 to 1."""

VERSION = 1
"""Version of the pictures; part of the name of the folder in the cache."""

CHUNK = 1000
"""Pictures that one task of a worker draws."""


def _polygon(corners: int, x: Array, y: Array) -> Array:
    sector = 2 * np.pi / corners
    return np.hypot(x, y) * np.cos(np.arctan2(x, -y) % sector - sector / 2) < np.cos(sector / 2)


def _star(x: Array, y: Array) -> Array:
    sector = 2 * np.pi / 5
    return np.hypot(x, y) < 0.42 + 0.58 * np.abs(1 - 2 * (np.arctan2(x, -y) % sector) / sector) ** 1.5


SHAPES: dict[str, Plane] = {
    "circle": lambda x, y: np.hypot(x, y) < 1,
    "square": lambda x, y: np.maximum(np.abs(x), np.abs(y)) < 0.85,
    "triangle": partial(_polygon, 3),
    "star": _star,
    "ring": lambda x, y: np.abs(np.hypot(x, y) - 0.75) < 0.25,
    "cross": lambda x, y: (np.minimum(np.abs(x), np.abs(y)) < 0.3) & (np.maximum(np.abs(x), np.abs(y)) < 1),
    "bar": lambda x, y: (np.abs(x) < 1) & (np.abs(y) < 0.35),
    "crescent": lambda x, y: (np.hypot(x, y) < 1) & (np.hypot(x - 0.5, y) > 0.8),
    "diamond": lambda x, y: np.abs(x) * 1.4 + np.abs(y) < 1,
    "half": lambda x, y: (np.hypot(x, y) < 1) & (y < 0),
}
"""Shapes within the unit circle. A horizontal flip does not change the class, and neither do the angles in use."""

TEXTURES: dict[str, Plane] = {
    "plain": lambda x, y: np.ones_like(x),
    "rows": lambda x, y: np.sin(11 * y) > 0,
    "columns": lambda x, y: np.sin(11 * x) > 0,
    "checks": lambda x, y: np.sin(8 * x) * np.sin(8 * y) > 0,
    "waves": lambda x, y: np.sin(13 * np.hypot(x, y)) > 0,
    "rays": lambda x, y: np.sin(8 * np.arctan2(y, x)) > 0,
    "shade": lambda x, y: np.clip(0.5 + 0.6 * y, 0, 1),
    "glow": lambda x, y: np.clip(1.1 - np.hypot(x, y), 0, 1),
    "dots": lambda x, y: np.hypot(x * 2.5 % 1 - 0.5, y * 2.5 % 1 - 0.5) < 0.3,
    "slants": lambda x, y: np.sin(9 * (np.abs(x) + y)) > 0,
}
"""Two colors, mixed over a shape."""

MOST_CLASSES = len(SHAPES) * len(TEXTURES)
SCENE_SHAPES = ("circle", "square", "triangle", "star", "cross")
"""The classes of scenes, with numbers from 1 in COCO's files."""


class Scene(NamedTuple):
    """A picture of several shapes."""

    pixels: Array
    """uint8 [height, width, 3]"""
    boxes: list[tuple[int, int, int, int]]
    """left, top, width and height of each shape, in pixels"""
    labels: list[int]
    """indices of SCENE_SHAPES"""


def class_names(count: int) -> list[str]:
    """Return the names of the first classes: all shapes with one texture, then with the next."""
    return [f"{shape}-{texture}" for texture in TEXTURES for shape in SHAPES][:count]


def draw_class(label: int, number: int, seed: int = 0, sides: tuple[int, int] = (48, 96)) -> Array:
    """Draw picture `number` of a class: uint8 [height, width, 3], with sides in this range of pixels."""
    rng = np.random.default_rng((seed, label, number))
    shape, texture = class_names(label + 1)[label].split("-")
    height, width = rng.integers(sides[0], sides[1] + 1, 2).tolist()
    pixels = _background(rng, height, width)
    radius = min(height, width) * rng.uniform(0.28, 0.45)
    center = [rng.uniform(min(radius, side / 2), max(side - radius, side / 2)) for side in (width, height)]
    _paint(rng, pixels, shape, texture, center, radius)
    return _finish(rng, pixels)


def draw_scene(number: int, seed: int = 0, sides: tuple[int, int] = (72, 128), most: int = 5) -> Scene:
    """Draw a picture of up to `most` shapes, which may touch but hardly overlap. Some pictures have none."""
    rng = np.random.default_rng((seed, number))
    height, width = rng.integers(sides[0], sides[1] + 1, 2).tolist()
    pixels = _background(rng, height, width)
    scene = Scene(pixels, [], [])
    taken = np.zeros((height, width), bool)
    for _ in range(rng.integers(most + 1)):
        radius = rng.uniform(7, min(height, width) / 3.2)
        center = [rng.uniform(radius, side - radius) for side in (width, height)]
        left, top = (max(0, int(c - radius)) for c in center)
        area = taken[top : int(top + 2 * radius) + 1, left : int(left + 2 * radius) + 1]
        if area.mean() > 0.1:
            continue
        label = int(rng.integers(len(SCENE_SHAPES)))
        texture = list(TEXTURES)[rng.integers(len(TEXTURES))]
        inside = _paint(rng, pixels, SCENE_SHAPES[label], texture, center, radius)
        area[:] = True
        rows, columns = np.flatnonzero(inside.any(1)).tolist(), np.flatnonzero(inside.any(0)).tolist()
        scene.boxes.append((columns[0], rows[0], columns[-1] - columns[0] + 1, rows[-1] - rows[0] + 1))
        scene.labels.append(label)
    return scene._replace(pixels=_finish(rng, pixels))


def _background(rng: np.random.Generator, height: int, width: int) -> Array:
    """Return a smooth change between two dark or two bright colors: float32 [height, width, 3]."""
    first, second = (rng.uniform(0, 90, (2, 3)) + 165 * rng.integers(2)).astype(np.float32)
    slope = rng.uniform(-1, 1, 2)
    y, x = (np.linspace(-0.5, 0.5, side, dtype=np.float32) for side in (height, width))
    mixed = np.clip(np.float32(0.5) + np.add.outer(slope[0] * y, slope[1] * x).astype(np.float32), 0, 1)
    return second + (first - second) * mixed[..., None]


def _paint(
    rng: np.random.Generator, pixels: Array, shape: str, texture: str, center: Sequence[float], radius: float
) -> Array:
    """Paint a shape in colors that differ from what is behind it, and return where it is: bool [height, width]."""
    height, width = pixels.shape[:2]
    angle, turn = rng.uniform(-0.3, 0.3), rng.uniform(0.8, 1.0)
    x = ((np.arange(width) + 0.5 - center[0]) / radius).astype(np.float32)
    y = ((np.arange(height) + 0.5 - center[1]) / radius).astype(np.float32)
    cos, sin = (value.astype(np.float32) for value in (np.cos(angle), np.sin(angle)))
    x, y = np.add.outer(-sin * y, cos * x) / np.float32(turn), np.add.outer(cos * y, sin * x)
    inside = SHAPES[shape](x, y)
    behind = pixels[int(center[1]), int(center[0])]
    bright = 110 * (behind.mean() < 128)
    colors = rng.uniform(20, 145, (2, 3)) + bright
    colors[1] = behind + (colors[1] - behind) * 0.35  # closer to the background
    mixed = TEXTURES[texture](x, y)[inside][:, None].astype(np.float32)
    pixels[inside] = colors[0] * mixed + colors[1] * (1 - mixed)
    return inside


def _finish(rng: np.random.Generator, pixels: Array) -> Array:
    noise = rng.standard_normal(pixels.shape[:2], np.float32) * np.float32(rng.uniform(2, 12))
    pixels += noise[..., None]
    return np.clip(pixels, 0, 255, out=pixels).astype(np.uint8)


# -- files


def write_classes(folder: Path, pictures: int, classes: int, valid: int, seed: int = 0, workers: int = 1) -> None:
    """Write training and validation pictures, divided evenly over the classes, to folder/train and folder/val."""
    names = class_names(classes)
    tasks = []
    for part, count in (("train", pictures), ("val", valid)):
        for name in names:
            (folder / part / name).mkdir(parents=True)
        tasks += [(folder / part, part == "val", seed, classes, *cut) for cut in _chunks(count)]
    _map(_write_pictures, tasks, workers)


def _write_pictures(folder: Path, held_out: bool, seed: int, classes: int, first: int, last: int) -> None:
    image, names = pillow(), class_names(classes)
    for number in range(first, last):
        pixels = draw_class(number % classes, number, 2 * seed + held_out)
        path = folder / names[number % classes] / f"{number:07d}.jpg"
        image.fromarray(pixels).save(path, quality=85)


def write_scenes(folder: Path, pictures: int, valid: int, seed: int = 0, workers: int = 1) -> None:
    """Write scenes to folder/train and folder/val, and their boxes to train.json and val.json in COCO's format."""
    categories = [{"id": number, "name": name} for number, name in enumerate(SCENE_SHAPES, start=1)]
    for part, count in (("train", pictures), ("val", valid)):
        (folder / part).mkdir(parents=True)
        chunks = _map(_write_scenes, [(folder / part, 2 * seed + (part == "val"), *c) for c in _chunks(count)], workers)
        found: dict[str, list[Any]] = {"images": [], "annotations": []}
        for chunk in chunks:
            for name, values in chunk.items():
                found[name] += values
        for number, annotation in enumerate(found["annotations"]):
            annotation["id"] = number
        (folder / f"{part}.json").write_text(json.dumps({**found, "categories": categories}), encoding="utf-8")


def _write_scenes(folder: Path, seed: int, first: int, last: int) -> dict[str, list[dict[str, Any]]]:
    image, images, annotations = pillow(), list[dict[str, Any]](), list[dict[str, Any]]()
    for number in range(first, last):
        scene = draw_scene(number, seed)
        image.fromarray(scene.pixels).save(folder / f"{number:07d}.jpg", quality=90)
        height, width = scene.pixels.shape[:2]
        images.append({"id": number, "file_name": f"{number:07d}.jpg", "width": width, "height": height})
        annotations += [
            {"image_id": number, "category_id": label + 1, "bbox": box, "area": box[2] * box[3], "iscrowd": 0}
            for box, label in zip(scene.boxes, scene.labels, strict=True)
        ]
    return {"images": images, "annotations": annotations}


def _chunks(count: int) -> Iterator[tuple[int, int]]:
    return ((first, min(first + CHUNK, count)) for first in range(0, count, CHUNK))


def _map(function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]], workers: int) -> list[Any]:
    if workers == 1:
        return [function(*task) for task in tasks]
    with ProcessPoolExecutor(workers) as pool:
        return list(pool.map(function, *zip(*tasks, strict=True)))


def cached(name: str, write: Callable[[Path], None]) -> Path:
    """Return a folder of the cache. If it does not exist, `write` fills a new folder first, which then gets the name.

    A process that is killed leaves no incomplete folder under this name.

    Raises:
        DataError: The disk is full, or the cache cannot be written to.
    """
    folder = cache_folder() / f"drawn-shapes-{VERSION}" / name
    if not folder.is_dir():
        partial_folder = folder.with_name(f"{name}.{os.getpid()}")
        shutil.rmtree(partial_folder, ignore_errors=True)
        try:
            partial_folder.mkdir(parents=True)
            write(partial_folder)
        except OSError as error:
            reason = _reason(error, folder)
            shutil.rmtree(partial_folder, ignore_errors=True)  # it may have filled the disk
            do = "make room there, or choose another disk for the cache: export XDG_CACHE_HOME=FOLDER"
            raise DataError(f"Cannot write drawn pictures to {folder.parent}.", reason, do) from None
        try:
            partial_folder.rename(folder)
        except OSError:  # another run was faster
            shutil.rmtree(partial_folder)
    return folder


def _reason(error: OSError, folder: Path) -> str:
    """Return the reason of an error as a sentence, with the space on the disk. Pillow's own errors have no number."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    return f"The system reports: {error.strerror or error}. The disk has {free / 1e6:,.1f} MB free."


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m unisono.recipes.vision.drawn_shapes")
    parser.add_argument("folder", type=Path, help="a new folder")
    parser.add_argument("--pictures", type=int, default=10_000, help="training pictures (10000)")
    parser.add_argument("--valid", type=int, default=1000, help="validation pictures (1000)")
    parser.add_argument("--classes", type=int, default=20, choices=range(2, MOST_CLASSES + 1), metavar="2..100")
    parser.add_argument("--scenes", action="store_true", help="several shapes in a picture, with boxes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that draw")
    request = parser.parse_args()
    if request.folder.exists() and any(request.folder.iterdir()):
        parser.error(f"{request.folder} is not empty: name a new folder")
    more = {"valid": request.valid, "seed": request.seed, "workers": request.workers}
    try:
        if request.scenes:
            write_scenes(request.folder, request.pictures, **more)
        else:
            write_classes(request.folder, request.pictures, request.classes, **more)
    except OSError as error:
        do = f"rm -r {shlex.quote(str(request.folder))}, and name a folder on a disk with more room."
        raise SystemExit(
            str(DataError(f"Cannot write pictures to {request.folder}.", _reason(error, request.folder), do))
        ) from None


if __name__ == "__main__":
    _main()
