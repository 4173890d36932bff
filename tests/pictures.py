"""Write small sets of pictures, and files that are no pictures, for tests."""

from __future__ import annotations

import io
import os
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from unisono.recipes.vision.drawn_shapes import write_classes


def need_pillow() -> None:
    """Skip the test if Pillow is not installed."""
    pytest.importorskip("PIL.Image", reason="Pillow is not installed: pip install 'unisono[image]'")


def jpeg(width: int = 40, height: int = 30) -> bytes:
    """Return a picture of noise as a JPEG file."""
    from PIL import Image

    file = io.BytesIO()
    Image.effect_noise((width, height), 60).convert("RGB").save(file, "JPEG")
    return file.getvalue()


def damaged_files() -> dict[str, bytes]:
    """Return files with the name of a picture that are none, or not a whole one."""
    return {
        "text.jpg": b"This is no picture.\n",
        "empty.png": b"",
        "cut.jpg": jpeg()[:-400],
        "header.jpg": jpeg()[:30],
    }


def settle(folder: Path) -> None:
    """Let all folders look as if nothing had changed in them for a minute, so that an index of them is cached."""
    for path in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        os.utime(path, (time.time() - 60, time.time() - 60))


def write_pictures(folder: Path, pictures: int = 90, classes: int = 3, valid: int = 20) -> Path:
    """Write pictures to folder/train and folder/val, and return the folder."""
    write_classes(folder, pictures, classes, valid)
    settle(folder)
    return folder


def write_tar(path: Path, members: Mapping[str, bytes]) -> None:
    """Write a tar file with these members."""
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def pack(folder: Path, out: Path, shards: int) -> str:
    """Write the pictures of a folder of classes to tar files, round robin, and return their pattern."""
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    samples = sorted((path.stem, label, path) for label, each in enumerate(classes) for path in each.iterdir())
    for shard in range(shards):
        members = dict[str, bytes]()
        for name, label, path in samples[shard::shards]:
            members |= {f"{name}.jpg": path.read_bytes(), f"{name}.cls": str(label).encode()}
        write_tar(out / f"{folder.name}-{shard}.tar", members)
    return f"{out}/{folder.name}-{{0..{shards - 1}}}.tar"
