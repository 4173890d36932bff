"""Train a small residual network with batch norm to tell pictures of clothes apart.

    unisono run image --ranks 2                                          two epochs of Fashion-MNIST
    unisono run image --ranks 2 --set source=digits --set epochs=30      1,797 digits that scikit-learn brings along
    unisono run image --ranks 2 --set data=FOLDER                        your own pictures, a folder for every class
    unisono copy image mine.py                                           own it, change it: unisono run mine.py

Data     Fashion-MNIST: 70,000 pictures of clothes, from Debian's package dataset-fashion-mnist or from its site
Model    a ResNet of 0.3 million parameters; batch norm takes every virtual rank's share of the batch by itself
Result   89.6 % of the 10,000 test pictures right after two epochs; of the digits' 359, 99.2 % after 30
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import unisono
from unisono.recipes.datasets.images import ImageData, ImageSplit, pictures


@dataclass(frozen=True, kw_only=True)
class Model:
    width: int = 32  # channels of the first stage; every further one has twice as many, and a quarter of the pixels
    stages: int = 3
    depth: int = 1  # blocks in a stage, of two convolutions each
    norm: Literal["batch", "group"] = "batch"  # group: over a picture's own channels, so that pictures are apart


@dataclass(frozen=True, kw_only=True)
class Settings(unisono.Settings):
    source: Literal["auto", "fashion", "digits"] = "auto"  # auto: the digits where fashion cannot be had
    data: Path | None = None  # a folder of your own: four idx files, or a folder of pictures for every class
    batch: int = 256
    epochs: int | None = 2
    lr: float = 0.01  # the highest; it warms up to there and goes back to nearly nothing
    weight_decay: float = 0.01
    augment: bool = True  # shift the pictures by a few pixels, and mirror half of them
    mirror: bool | None = None  # none: only clothes, which stay what they are
    train_images: int | None = None  # the first so many only; none: all
    valid_images: int | None = None
    model: Model = Model()

    def __post_init__(self) -> None:
        """What does not go with this model is said before it is made."""
        parallel = self.parallel
        if parallel.pipeline > 1 and self.model.norm == "batch":
            raise unisono.SettingsError(
                f"The image recipe was asked for parallel.pipeline={parallel.pipeline} and model.norm=batch.",
                "Batch norm's running statistics go from one micro-batch to the next, and in a pipeline many are under "
                "way at once.",
                "--set model.norm=group, or: --set parallel.pipeline=1",
            )
        for axis, size, true in (
            ("tensor", parallel.tensor, "Its matrices are convolutions; those of attention and feed-forward are cut."),
            ("context", parallel.context, "A picture is no sequence: a convolution looks at each pixel's neighbours."),
        ):
            if size > 1:
                do = f"--set parallel.{axis}=1 --set parallel.shard={size}"
                raise unisono.SettingsError(f"The image recipe was asked for parallel.{axis}={size}.", true, do)


def main(run: unisono.Run[Settings]) -> None:
    settings = run.settings
    with run.first():  # one process per host fetches, the others find it there
        found = pictures(settings.source, settings.data)
    run.print(found.line())
    train_set, valid_set = build_sets(found, settings)

    model = run.place(lambda: ResNet(found.train.images.shape[1:], len(found.classes), settings.model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
    total = run.count_steps(train_set)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.lr, total_steps=total)
    run.track(model=model, optimizer=optimizer, schedule=schedule)

    for step in run.steps(train_set):
        step.run(model, loss_sum)  # every micro-batch of this process, forward and backward
        step.update(optimizer, schedule, clip=settings.clip)
        run.log(loss=step.loss)

    result = run.evaluate(model, valid_set, measure)
    run.log(result)
    run.print(
        f"validation: {result['accuracy']:.2%} right, loss {result['valid_loss']:.4f}, "
        f"on {len(valid_set):,} pictures it has never seen"
    )


def loss_sum(output: Tensor, images: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """How much these labels surprise the model, in nats, and how many there are."""
    return F.cross_entropy(output, labels, reduction="sum"), len(labels)


def measure(output: Tensor, images: Tensor, labels: Tensor) -> dict[str, tuple[Tensor, int]]:
    """How many of these pictures the model names right, and how much they surprise it."""
    right = (output.argmax(1) == labels).sum()
    return {"accuracy": (right, len(labels)), "valid_loss": loss_sum(output, images, labels)}


def build_sets(found: ImageData, settings: Settings) -> tuple[ImageDataset, ImageDataset]:
    """The pictures to train on, moved about if asked, and those to validate on, as they are."""
    train, valid = found.train.first(settings.train_images), found.valid.first(settings.valid_images)
    pixels = train.images.float()  # all of them: 0.2 s for Fashion-MNIST, and the same on every process
    mean, std = pixels.mean().item(), max(pixels.std().item(), 1.0)
    mirror = found.mirror if settings.mirror is None else settings.mirror
    shift = max(1, min(train.images.shape[2:]) // 28)  # 1 pixel of 28
    if not settings.augment:
        return ImageDataset(train, mean, std), ImageDataset(valid, mean, std)
    return ImageDataset(train, mean, std, shift, mirror), ImageDataset(valid, mean, std)


class ImageDataset(Dataset[tuple[Tensor, Tensor]]):
    """(image, label): float [channels, height, width] with the training pictures' mean 0 and deviation 1, and int64.

    shift   every picture is moved by up to so many pixels, in both directions; what comes in is black
    mirror  left and right change places in every second picture

    A whole micro-batch is read at once. It draws from torch's global generator, which was seeded for it: the same
    pictures come out whoever fetches them.
    """

    def __init__(self, part: ImageSplit, mean: float, std: float, shift: int = 0, mirror: bool = False) -> None:
        self.part, self.mean, self.std, self.shift, self.mirror = part, mean, std, shift, mirror

    def __len__(self) -> int:
        return len(self.part.labels)

    def __getitem__(self, sample: int) -> tuple[Tensor, Tensor]:
        return self.__getitems__([sample])[0]

    def __getitems__(self, samples: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        index = torch.tensor(samples)
        images = self.part.images[index]
        if self.shift:
            images = shifted(images, self.shift)
        if self.mirror:
            images = torch.where(torch.rand(len(images), 1, 1, 1) < 0.5, images.flip(3), images)
        return list(zip((images.float() - self.mean) / self.std, self.part.labels[index], strict=True))


def shifted(images: Tensor, most: int) -> Tensor:
    """Every picture moved by its own -most to most pixels, down and to the right; same shape [n, c, h, w]."""
    count, channels, height, width = images.shape
    down, right = torch.randint(2 * most + 1, (2, count, 1))
    rows, columns = down + torch.arange(height), right + torch.arange(width)  # [n, h] and [n, w], of the padded picture
    return F.pad(images, (most, most, most, most))[
        torch.arange(count)[:, None, None, None],
        torch.arange(channels)[None, :, None, None],
        rows[:, None, :, None],
        columns[:, None, None, :],
    ]


class ResNet(nn.Module):
    """A residual network (arXiv 1512.03385) for small pictures of one shape, [channels, height, width]."""

    def __init__(self, shape: Sequence[int], classes: int, model: Model) -> None:
        super().__init__()
        channels, *size = shape
        stride = 2 if min(size) >= 16 else 1  # three quarters of the pixels go at once, where there are enough
        self.stem = nn.Sequential(
            nn.Conv2d(channels, model.width, 3, stride, padding=1, bias=False),
            norm(model, model.width),
            nn.ReLU(),
        )
        blocks: list[nn.Module] = []
        inputs = model.width
        for stage in range(model.stages):
            for block in range(model.depth):
                outputs = model.width * 2**stage
                blocks.append(Block(model, inputs, outputs, stride=2 if stage and not block else 1))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, classes)
        for part in self.modules():
            if isinstance(part, nn.Conv2d):  # as CPUs and tensor cores like it: a pixel's channels side by side
                part.weight.data = part.weight.data.contiguous(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> Tensor:
        """images [batch, channels, height, width] to logits [batch, classes]."""
        x = self.blocks(self.stem(images.contiguous(memory_format=torch.channels_last)))
        return self.head(x.mean((2, 3)))


def norm(model: Model, channels: int) -> nn.Module:
    """Batch norm; or group norm (arXiv 1803.08494), with up to 8 channels in a group."""
    if model.norm == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(channels // math.gcd(8, channels), channels)


class Block(nn.Module):
    """Two convolutions, added to what came in. At the start they add nothing, which keeps the first steps calm."""

    def __init__(self, model: Model, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.first_norm = norm(model, outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = norm(model, outputs)
        nn.init.zeros_(self.second_norm.get_parameter("weight"))
        self.past: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.past = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), norm(model, outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.past(x) + self.second_norm(self.second(y)))


if __name__ == "__main__":
    unisono.main(main, Settings)
