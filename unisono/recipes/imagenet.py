"""Train ResNet-50 or a ViT on pictures of any sizes, from folders or tar files that need not fit into memory.

    unisono run imagenet --ranks 2                                            drawn pictures of shapes
    unisono run imagenet --ranks 2 --set model.kind=vit                       a ViT in place of a ResNet-50
    unisono run imagenet --ranks 2 --set data=FOLDER                          your own: one folder per class
    unisono run imagenet --ranks 2 --set data=SHARDS                          what `unisono shards` has written
    unisono run imagenet --set data='t-{000..127}.tar' --set valid='v-{0..9}.tar' --set classes=1000
    unisono copy imagenet mine.py                                             then edit it and: unisono run mine.py

Data     a folder with one folder per class, or with such folders in train/ and val/; shards, also at a URL; tar files.
         By default 4,000 pictures of 20 kinds of shapes, which are drawn at the first start
Model    those of the papers with --set model.width=64 --set size=224 (for the ViT also heads=12, depth=12, patch=16)
Training random crops, flips and colors in loader workers; mixup, label smoothing, an average of the weights
Result   55.5 % top-1 and 95.1 % top-5 accuracy of that average on 800 drawn pictures, after eight epochs
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import unisono
from unisono.recipes.datasets.class_folders import files_of
from unisono.recipes.vision.bottleneck_resnet import BottleneckResNet
from unisono.recipes.vision.picture_files import SUFFIXES
from unisono.recipes.vision.picture_sets import PictureFiles, PictureSets, load_sets
from unisono.recipes.vision.picture_transforms import CenterView, RandomView
from unisono.recipes.vision.vision_transformer import VisionTransformer


@dataclass(frozen=True, kw_only=True)
class Model:
    kind: Literal["resnet50", "vit"] = "resnet50"  # architecture
    width: int = 8  # channels of a ResNet's first stage, or of each attention head; 64 in both papers
    heads: int = 6  # attention heads of a ViT; 12 in ViT-B
    depth: int = 6  # blocks of a ViT; 12 in ViT-B
    patch: int = 4  # width and height of a ViT's patches, in pixels; 16 in ViT-B/16


@dataclass(frozen=True, kw_only=True)
class Settings(unisono.Settings):
    data: str | None = None  # folder with one folder per class, or with train/ and val/; shards; tar files. none: drawn
    valid: str | None = None  # validation data, in the same form; none: val/, or a tenth of the training data
    classes: int | None = None  # number of classes in tar files, or of those to draw (2 to 100; none: 20)
    drawn: int = 4000  # number of training pictures to draw, without data
    window: int = 10_000  # how far samples of shards and tar files are shuffled
    cache: Path | None = None  # folder on a local disk that keeps shards at URLs
    cache_limit: str = "100GB"  # size of that cache
    size: int = 32  # width and height of the pictures that the model gets
    batch: int = 64
    epochs: int | None = 8
    lr: float = 4e-3  # peak learning rate of the one-cycle schedule
    weight_decay: float = 0.05  # weight decay of AdamW; norms and biases have none
    clip: float | None = 1.0
    least: float = 0.35  # least part of a picture's area in a random crop; 0.08 is usual for ImageNet
    jitter: float = 0.3  # largest relative change of brightness, contrast and saturation
    mixup: float = 0.1  # both parameters of the beta distribution of mixup (arXiv 1710.09412); 0: no mixup
    smoothing: float = 0.1  # label smoothing: part of the target that all classes share
    ema: float = 0.99  # decay of the average of the weights, which is evaluated; smaller in the first steps
    evaluate_every: int = 100  # steps between evaluations; 0: only at the end
    model: Model = Model()

    def __post_init__(self) -> None:
        """Refuse sizes and parallelism that the models do not support."""
        if self.model.kind == "vit" and self.size % self.model.patch:
            raise unisono.SettingsError(
                f"The imagenet recipe cannot have size={self.size} with model.patch={self.model.patch}.",
                "A ViT divides a picture into whole patches.",
                f"--set size={self.model.patch * max(1, round(self.size / self.model.patch))}",
            )
        self.parallel.refuse("The imagenet recipe", "It replicates the model, or shards its parameters.")


def main(run: unisono.Run[Settings]) -> None:
    settings = run.settings
    with run.first():  # one process per host draws or scans, the others use its files
        data = load(settings)
    run.print(data.summary)

    model = run.place(lambda: build(settings, len(data.classes)))
    average = run.place(lambda: build(settings, len(data.classes)).requires_grad_(False))
    average.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(groups(model, settings.weight_decay), lr=settings.lr)
    total_steps = run.count_steps(data.train)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.lr, total_steps=total_steps)
    run.track(model=model, average=average, optimizer=optimizer, schedule=schedule)

    for step in run.steps(data.train, collate_fn=partial(mix, alpha=settings.mixup)):
        step.run(model, partial(mixed_loss, smoothing=settings.smoothing))
        step.update(optimizer, schedule, clip=settings.clip)
        update_average(average, model, min(settings.ema, (1 + step.number) / (10 + step.number)))
        run.log(loss=step.loss)
        if settings.evaluate_every and step.every(settings.evaluate_every) and step.number + 1 < total_steps:
            result = run.evaluate(average, data.valid, measure)
            run.log(result)
            run.print(f"step {step.number + 1}: {describe(result)}")

    result = run.evaluate(average, data.valid, measure)
    run.log(result)
    run.print(f"validation: {describe(result)}")


def load(settings: Settings) -> PictureSets:
    """Find the training and the validation pictures."""
    return load_sets(
        settings.data,
        settings.valid,
        (RandomView(settings.size, settings.least, settings.jitter), CenterView(settings.size)),
        classes=settings.classes,
        window=settings.window,
        skip=settings.loader.on_error == "skip",
        drawn=settings.drawn,
        cache=unisono.ShardCache(settings.cache, settings.cache_limit) if settings.cache else None,
    )


def build(settings: Settings, classes: int) -> nn.Module:
    """Build the model, which takes pictures as bytes: they are a quarter of the size until they arrive there."""
    model = settings.model
    if model.kind == "vit":
        net: nn.Module = VisionTransformer(classes, model.width, model.heads, model.depth, model.patch, settings.size)
    else:
        net = BottleneckResNet(classes, model.width, settings.size)
    return nn.Sequential(Normalize(), net)


class Normalize(nn.Module):
    """From bytes to numbers with the mean and the standard deviation of ImageNet's colors."""

    mean: Tensor
    deviation: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", 255 * torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1))
        self.register_buffer("deviation", 255 * torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1))

    def forward(self, pictures: Tensor) -> Tensor:
        return (pictures.float() - self.mean) / self.deviation


def groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Return the optimizer's groups of parameters: matrices and kernels decay, vectors do not."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def mix(samples: Sequence[tuple[Tensor, int]], alpha: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Collate samples, and mix each picture with another one of the micro-batch (mixup, arXiv 1710.09412).

    It runs in loader workers. Its random numbers are seeded for each micro-batch.

    Returns:
        The pictures: uint8 [batch, 3, size, size]; their labels, those of the other pictures, and the shares of the
        first: each [batch].
    """
    pictures = torch.stack([picture for picture, _ in samples])
    labels = torch.tensor([label for _, label in samples])
    if not alpha:
        return pictures, labels, labels, torch.ones(len(labels))
    others = torch.randperm(len(labels))
    shares = torch.tensor([random.betavariate(alpha, alpha) for _ in samples])
    mixed = torch.lerp(pictures[others].float(), pictures.float(), shares.view(-1, 1, 1, 1)).round()
    return mixed.to(torch.uint8), labels, labels[others], shares


def mixed_loss(
    output: Tensor, pictures: Tensor, labels: Tensor, others: Tensor, shares: Tensor, *, smoothing: float
) -> tuple[Tensor, int]:
    """Return the sum of the cross entropy, in nats, and the number of pictures."""
    first, second = (
        F.cross_entropy(output, target, reduction="none", label_smoothing=smoothing) for target in (labels, others)
    )
    return (shares * first + (1 - shares) * second).sum(), len(labels)


@torch.no_grad()
def update_average(average: nn.Module, model: nn.Module, decay: float) -> None:
    """Move the average of the weights toward the model. Buffers are those of the model."""
    for kept, weight in zip(average.parameters(), model.parameters(), strict=True):
        kept.lerp_(weight, 1 - decay)
    for copy, buffer in zip(average.buffers(), model.buffers(), strict=True):
        copy.copy_(buffer)


def measure(output: Tensor, pictures: Tensor, labels: Tensor) -> dict[str, tuple[Tensor, int]]:
    """Return sum and count of each validation metric."""
    found = output.topk(min(5, output.shape[1])).indices == labels[:, None]
    loss = F.cross_entropy(output, labels, reduction="sum")
    count = len(labels)
    return {"top1": (found[:, 0].sum(), count), "top5": (found.any(1).sum(), count), "valid_loss": (loss, count)}


def describe(result: dict[str, float]) -> str:
    """Return the metrics as a line."""
    return f"top-1 {result['top1']:.2%}, top-5 {result['top5']:.2%}, loss {result['valid_loss']:.4f}"


def predict(settings: Settings, model: nn.Module, path: Path) -> unisono.Prediction:
    """Predict the class of each picture of a folder, or of one picture, with its probability."""
    classes, files, view = load(settings).classes, files_of(path, "pictures", SUFFIXES), CenterView(settings.size)

    def forward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        best = F.softmax(model(batch[0]), dim=1).max(1)
        return {"file": batch[1], "class": best.indices, "probability": best.values}

    def name(row: dict[str, Tensor]) -> dict[str, object]:
        file, kind = str(files[int(row["file"])]), classes[int(row["class"])]
        return {"file": file, "class": kind, "probability": float(row["probability"])}

    return unisono.Prediction(PictureFiles(files, view), forward=forward, describe=name)


if __name__ == "__main__":
    unisono.main(main, Settings, predict=predict)
