"""Four ways to read one data set of JPEG files: a folder, WebDataset, MosaicML Streaming, and ours.

Each arm yields the sizes of batches of BATCH decoded samples, endlessly, in another order each epoch. The function that
decodes a sample is the same for all: a random crop of random size, flipped at random, resized to SIZE.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import random
import sys
from collections.abc import Callable, Generator
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from unisono.data.loader import Loader, Schedule
from unisono.data.prepared import layout_of
from unisono.data.streaming.stream import Stream
from unisono.plan.assignment import Slot
from unisono.plan.batch_order import BatchOrder

SIZE, BATCH, WINDOW = 64, 64, 2000
Sizes = Generator[int]


def augmented(picture: Image.Image) -> torch.Tensor:
    """Return a random crop of a picture, uint8 [3, SIZE, SIZE]."""
    width, height = picture.size
    side = int(min(width, height) * random.uniform(0.5, 1.0))
    left, top = random.randint(0, width - side), random.randint(0, height - side)
    picture = picture.convert("RGB").resize(
        (SIZE, SIZE), Image.Resampling.BILINEAR, (left, top, left + side, top + side)
    )
    if random.random() < 0.5:
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


def decoded(content: bytes) -> torch.Tensor:
    """Decode a JPEG."""
    with Image.open(io.BytesIO(content)) as picture:
        return augmented(picture)


def picture_and_label(sample: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """Decode a sample of a tar."""
    return decoded(sample["jpg"]), int(sample["cls"])


class Folder(Dataset[tuple[torch.Tensor, int]]):
    """As torchvision's ImageFolder: a folder for each class."""

    def __init__(self, root: Path) -> None:
        classes = sorted(path.name for path in root.iterdir())
        self.files = [
            (str(path), label) for label, name in enumerate(classes) for path in sorted((root / name).iterdir())
        ]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        path, label = self.files[number]
        with Image.open(path) as picture:
            return augmented(picture), label


def _endless(loader: Any) -> Sizes:
    while True:
        for x, *_ in loader:
            yield len(x)


def folder(data: Path, workers: int) -> Sizes:
    """Read single files."""
    persistent = workers > 0
    return _endless(
        DataLoader(Folder(data / "folder"), BATCH, True, num_workers=workers, persistent_workers=persistent)
    )


def webdataset(data: Path, workers: int) -> Sizes:
    """Read tar files with WebDataset: shards are shuffled, then samples in a buffer."""
    import webdataset as wds  # type: ignore[import-not-found]

    urls = [str(path) for path in sorted((data / "shards").glob("*.tar"))]
    stream = wds.WebDataset(urls, shardshuffle=len(urls), nodesplitter=None, empty_check=False)
    stream = stream.shuffle(WINDOW).map(_of_webdataset).batched(BATCH)
    return _endless(wds.WebLoader(stream, batch_size=None, num_workers=workers, persistent_workers=workers > 0))


def _of_webdataset(sample: dict[str, Any]) -> tuple[torch.Tensor, int]:
    return decoded(sample["jpg"]), int(sample["cls"])


def mosaic_base() -> Any:
    """Import streaming.base. The package itself also imports data sets that need torchvision."""
    if "streaming" not in sys.modules:
        found = importlib.util.find_spec("streaming")
        assert found is not None
        package = ModuleType("streaming")
        package.__path__ = list(found.submodule_search_locations or [])
        sys.modules["streaming"] = package
    return importlib.import_module("streaming.base")


def mosaic(data: Path, workers: int) -> Sizes:
    """Read MDS files with MosaicML Streaming."""
    StreamingDataset: Any = mosaic_base().StreamingDataset

    class Pictures(StreamingDataset):
        def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
            sample = super().__getitem__(number)
            return decoded(sample["jpg"]), int(sample["cls"])

    stream = Pictures(local=str(data / "mds"), shuffle=True, batch_size=BATCH, num_canonical_nodes=1)
    return _endless(DataLoader(stream, BATCH, num_workers=workers, persistent_workers=workers > 0))


def ours(data: Path, workers: int) -> Sizes:
    """Read the same tar files with the loader of run.steps, one virtual rank's micro-batches of BATCH samples."""
    stream = Stream.indexed(data / "shards", window=WINDOW, map=picture_and_label)
    layout = layout_of(stream)
    order = BatchOrder(
        length=layout.length, batch=8 * BATCH, virtual_ranks=8, seed=1, shards=layout.shards, window=layout.window
    )
    loader = Loader(
        stream,
        order,
        Schedule(((0, 8),)),
        slot=Slot(0),
        first=0,
        last=10**9,
        device=torch.device("cpu"),
        workers=workers,
    )
    try:
        for _, (x, _) in loader:
            yield len(x)
    finally:
        loader.close()


ARMS: dict[str, Callable[[Path, int], Sizes]] = {
    "folder": folder,
    "webdataset": webdataset,
    "mosaic": mosaic,
    "ours": ours,
}


def write_pictures(root: Path, amount: int, seed: int = 1) -> None:
    """Write JPEG files of mixed sizes, about 8 kB each, in a folder for each of ten classes."""
    rng = np.random.default_rng(seed)
    for number in range(amount):
        label = number % 10
        path = root / f"class-{label}" / f"{number:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        width, height = rng.integers(96, 257, 2)
        small = rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)
        small[..., label % 3] = 20 * label
        Image.fromarray(small).resize((int(width), int(height)), Image.Resampling.BICUBIC).save(path, quality=90)


def write_mds(root: Path, source: Path) -> None:
    """Write the files of a folder for MosaicML Streaming."""
    with mosaic_base().MDSWriter(out=str(root), columns={"jpg": "bytes", "cls": "int"}, size_limit=1 << 24) as out:
        pictures = Folder(source).files
        random.Random(0).shuffle(pictures)
        for path, label in pictures:
            out.write({"jpg": Path(path).read_bytes(), "cls": label})


def first_samples(arm: Sizes, samples: int) -> int:
    """Read at least this many samples, and return how many."""
    seen = 0
    for _ in count():
        if seen >= samples:
            break
        seen += next(arm)
    return seen
