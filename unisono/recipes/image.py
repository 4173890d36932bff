"""Train a small residual network with batch norm to classify images of clothes.

    unisono run image --ranks 2                                          two epochs of Fashion-MNIST
    unisono run image --ranks 2 --set source=digits --set epochs=30      the 1,797 digits of scikit-learn
    unisono run image --ranks 2 --set data=FOLDER                        your own images, one folder per class
    unisono copy image mine.py                                           then edit it and: unisono run mine.py

Data     Fashion-MNIST: 70,000 images of clothes, from Debian's package dataset-fashion-mnist or from its site
Model    a ResNet of 0.3 million parameters; batch norm uses the statistics of each virtual rank's share of the batch
Result   accuracy of 89.6 % on the 10,000 test images after two epochs; 99.2 % on 359 digits after 30
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import unisono
from unisono.recipes.datasets.images import ImageData, ImageSplit, image_files, load_images, read_images


@dataclass(frozen=True, kw_only=True)
class Model:
    width: int = 32  # channels of the first stage; each later stage has twice as many and a quarter of the pixels
    stages: int = 3  # number of stages
    depth: int = 1  # residual blocks per stage, of two convolutions each
    norm: Literal["batch", "group"] = "batch"  # normalization layer; group norm treats each image on its own


@dataclass(frozen=True, kw_only=True)
class Settings(unisono.Settings):
    source: Literal["auto", "fashion", "digits"] = "auto"  # data set; auto: digits if fashion is unavailable
    data: Path | None = None  # your own data set: a folder with four idx files, or with one folder of images per class
    batch: int = 256
    epochs: int | None = 2
    lr: float = 0.01  # peak learning rate of the one-cycle schedule
    weight_decay: float = 0.01  # weight decay of AdamW
    augment: bool = True  # shift training images by a few pixels, and flip half of them
    mirror: bool | None = None  # allow horizontal flips; none: only for images of clothes
    train_images: int | None = None  # number of training images to use; none: all
    valid_images: int | None = None  # number of validation images to use; none: all
    model: Model = Model()

    def __post_init__(self) -> None:
        """Refuse parallelism that this model does not support."""
        parallel = self.parallel
        if parallel.pipeline > 1 and self.model.norm == "batch":
            raise unisono.SettingsError(
                f"The image recipe cannot have parallel.pipeline={parallel.pipeline} with model.norm=batch.",
                "Batch norm updates its running statistics in the order of micro-batches, and a pipeline computes "
                "several at once.",
                "--set model.norm=group, or: --set parallel.pipeline=1",
            )
        for axis, reason in (
            ("tensor", "Tensor parallelism divides attention and feed-forward, not convolutions."),
            ("context", "An image is not a sequence: a convolution needs each pixel's neighbors."),
        ):
            parallel.refuse("The image recipe", reason, [axis])


def main(run: unisono.Run[Settings]) -> None:
    settings = run.settings
    with run.first():  # one process per host downloads, the others read its copy
        data = load_images(settings.source, settings.data)
    run.print(data.summary())
    train_set, valid_set = build_datasets(data, settings)

    model = run.place(lambda: ResNet(data.train.images.shape[1:], len(data.classes), settings.model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
    total_steps = run.count_steps(train_set)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.lr, total_steps=total_steps)
    run.track(model=model, optimizer=optimizer, schedule=schedule)

    for step in run.steps(train_set):
        step.run(model, loss_sum)  # forward and backward of this process's micro-batches
        step.update(optimizer, schedule, clip=settings.clip)
        run.log(loss=step.loss)

    result = run.evaluate(model, valid_set, measure)
    run.log(result)
    run.print(
        f"validation: accuracy {result['accuracy']:.2%}, loss {result['valid_loss']:.4f} "
        f"on {len(valid_set):,} held-out images"
    )


def loss_sum(output: Tensor, images: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """Return the sum of the cross entropy, in nats, and the number of images."""
    return F.cross_entropy(output, labels, reduction="sum"), len(labels)


def measure(output: Tensor, images: Tensor, labels: Tensor) -> dict[str, tuple[Tensor, int]]:
    """Return sum and count of each validation metric."""
    correct = (output.argmax(1) == labels).sum()
    return {"accuracy": (correct, len(labels)), "valid_loss": loss_sum(output, images, labels)}


def build_datasets(data: ImageData, settings: Settings) -> tuple[ImageDataset, ImageDataset]:
    """Build the training set, with augmentation if it is enabled, and the validation set."""
    train, valid = data.train.first(settings.train_images), data.valid.first(settings.valid_images)
    pixels = train.images.float()  # 0.2 s for Fashion-MNIST, and the same on every process
    mean, std = pixels.mean().item(), max(pixels.std().item(), 1.0)
    mirror = data.mirror if settings.mirror is None else settings.mirror
    shift = max(1, min(train.images.shape[2:]) // 28)  # 1 pixel of 28
    if not settings.augment:
        return ImageDataset(train, mean, std), ImageDataset(valid, mean, std)
    return ImageDataset(train, mean, std, shift, mirror), ImageDataset(valid, mean, std)


class ImageDataset(Dataset[tuple[Tensor, Tensor]]):
    """Normalized images with their labels: (float [channels, height, width], int64).

    `__getitems__` reads a whole micro-batch. Augmentation draws from torch's global generator, which the run seeds for
    each micro-batch, so the result does not depend on the process or worker that reads it.

    Args:
        split: The images and labels.
        mean: Mean of the training images' pixels.
        std: Standard deviation of the training images' pixels.
        shift: Largest shift in each direction, in pixels. Pixels that are shifted in are black.
        mirror: Flip each image horizontally with a probability of one half.
    """

    def __init__(self, split: ImageSplit, mean: float, std: float, shift: int = 0, mirror: bool = False) -> None:
        self.split, self.mean, self.std, self.shift, self.mirror = split, mean, std, shift, mirror

    def __len__(self) -> int:
        return len(self.split.labels)

    def __getitem__(self, sample: int) -> tuple[Tensor, Tensor]:
        return self.__getitems__([sample])[0]

    def __getitems__(self, samples: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        index = torch.tensor(samples)
        images = self.split.images[index]
        if self.shift:
            images = random_shift(images, self.shift)
        if self.mirror:
            images = torch.where(torch.rand(len(images), 1, 1, 1) < 0.5, images.flip(3), images)
        return list(zip((images.float() - self.mean) / self.std, self.split.labels[index], strict=True))


def random_shift(images: Tensor, limit: int) -> Tensor:
    """Shift each image [n, c, h, w] by its own random number of pixels, at most `limit` in each direction."""
    count, channels, height, width = images.shape
    down, right = torch.randint(2 * limit + 1, (2, count, 1))
    rows, columns = down + torch.arange(height), right + torch.arange(width)  # [n, h] and [n, w], of the padded image
    return F.pad(images, (limit, limit, limit, limit))[
        torch.arange(count)[:, None, None, None],
        torch.arange(channels)[None, :, None, None],
        rows[:, None, :, None],
        columns[:, None, None, :],
    ]


class ResNet(nn.Module):
    """A residual network (arXiv 1512.03385) for small images of one shape, [channels, height, width]."""

    def __init__(self, shape: Sequence[int], classes: int, model: Model) -> None:
        super().__init__()
        channels, *size = shape
        stride = 2 if min(size) >= 16 else 1  # reduce the resolution at once, unless it is low
        self.stem = nn.Sequential(
            nn.Conv2d(channels, model.width, 3, stride, padding=1, bias=False),
            make_norm(model, model.width),
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
        for module in self.modules():
            if isinstance(module, nn.Conv2d):  # the quicker memory format on CPUs and tensor cores
                module.weight.data = module.weight.data.contiguous(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> Tensor:
        """Map images [batch, channels, height, width] to logits [batch, classes]."""
        x = self.blocks(self.stem(images.contiguous(memory_format=torch.channels_last)))
        return self.head(x.mean((2, 3)))


def make_norm(model: Model, channels: int) -> nn.Module:
    """Make batch norm, or group norm (arXiv 1803.08494) with up to 8 channels per group."""
    if model.norm == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(channels // math.gcd(8, channels), channels)


class Block(nn.Module):
    """Two convolutions with a residual connection. They start as zero, which stabilizes the first steps."""

    def __init__(self, model: Model, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.first_norm = make_norm(model, outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = make_norm(model, outputs)
        nn.init.zeros_(self.second_norm.get_parameter("weight"))
        self.past: nn.Module = nn.Identity()  # the shortcut past the convolutions
        if stride > 1 or inputs != outputs:
            projection = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
            self.past = nn.Sequential(projection, make_norm(model, outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.past(x) + self.second_norm(self.second(y)))


def predict(settings: Settings, model: nn.Module, path: Path) -> unisono.Prediction:
    """Predict the class of each image of a folder, or of one image, with its probability."""
    data = load_images(settings.source, settings.data)
    return predict_images(path, data, build_datasets(data, settings)[1])


def predict_images(
    path: Path,
    data: ImageData,
    known: ImageDataset,
    logits: Callable[[nn.Module, Tensor], Tensor] = nn.Module.__call__,
) -> unisono.Prediction:
    """Predict classes of `data` for the images of a path, normalized as `known`, from logits(model, images)."""
    files = image_files(path)
    images, shape = read_images(files), data.train.images.shape[1:]
    if images.shape[1:] != shape:
        raise unisono.DataError(
            f"The images of {path} do not fit the model.",
            f"Their shape is {list(images.shape[1:])}, and that of its training images {list(shape)} (channels first).",
            "resize them, or make them grayscale: mogrify -resize WIDTHxHEIGHT! FILES",
        )
    numbers = torch.arange(len(files))  # in place of labels

    def forward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        best = F.softmax(logits(model, batch[0]), dim=1).max(1)
        return {"file": batch[1], "class": best.indices, "probability": best.values}

    def describe(row: dict[str, Tensor]) -> dict[str, object]:
        name, kind = str(files[int(row["file"])]), data.classes[int(row["class"])]
        return {"file": name, "class": kind, "probability": float(row["probability"])}

    samples = ImageDataset(ImageSplit(images, numbers), known.mean, known.std)
    return unisono.Prediction(samples, forward=forward, describe=describe)


if __name__ == "__main__":
    unisono.main(main, Settings, predict=predict)
