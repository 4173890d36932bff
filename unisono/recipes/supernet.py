"""Search the architecture of a small network for images, with shared weights: a one-shot super-network.

    unisono run supernet --ranks 2                                  train the super-network, and search its paths
    unisono run supernet --ranks 2 --set path=301213                train one path alone, from scratch
    unisono run supernet --ranks 2 --set data=FOLDER                your own images, one folder per class
    unisono copy supernet mine.py                                   then edit it and: unisono run mine.py

Data     that of the image recipe. A part of the training images is for the search; the test images are for the end
Search   each step trains one path, drawn uniformly (Single Path One-Shot, arXiv 1904.00420). Paths are then compared
         with the shared weights, and evolved
Result   the best, a random and the worst path, with shared weights; then trained from scratch with --set path=...
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

import unisono
from unisono.recipes.datasets.images import ImageData, ImageSplit, load_images
from unisono.recipes.image import ImageDataset, loss_sum, measure, predict_images


@dataclass(frozen=True, kw_only=True)
class Settings(unisono.Settings):
    source: Literal["auto", "fashion", "digits"] = "auto"  # data set; auto: digits if fashion is unavailable
    data: Path | None = None  # your own data set: a folder with four idx files, or with one folder of images per class
    batch: int = 128
    epochs: int | None = 30
    lr: float = 0.01  # peak learning rate of the one-cycle schedule
    weight_decay: float = 0.01  # weight decay of AdamW
    train_images: int | None = None  # number of training images to use; none: all
    search_part: float = 0.25  # part of the training images that compares paths, and trains nothing
    width: int = 16  # channels of the first half of the layers; the second half has twice as many
    layers: int = 6  # layers with a choice of operations
    path: str = ""  # one operation (0 to 3) for each layer, as in 301213; empty: train the super-network, and search
    most: float = 0.5  # most parameters of the operations of a path, as a part of those of the largest path
    population: int = 16  # paths in each generation of the search
    generations: int = 5  # generations of the search

    def __post_init__(self) -> None:
        """Refuse paths that do not exist, and parallelism that this model does not support."""
        if self.path and (len(self.path) != self.layers or set(self.path) - set(OPERATIONS)):
            raise unisono.SettingsError(
                f"There is no path {self.path}.",
                f"It has one digit for each of {self.layers} layers: {describe(sorted(OPERATIONS))}.",
                f"--set path={'1' * self.layers}",
            )
        for name, least, most in (
            ("search_part", 0.01, 0.9),
            ("most", 0.2, 1),
            ("population", 2, 999),
            ("layers", 1, 99),
        ):
            if not least <= getattr(self, name) <= most:
                error = f"{name} = {getattr(self, name)} is out of range."
                raise unisono.SettingsError(error, f"It is from {least} to {most}.", f"--set {name}={least}")
        self.parallel.refuse("The supernet recipe", "Each step computes other layers.")


def main(run: unisono.Run[Settings]) -> None:
    settings = run.settings
    with run.first():  # one process per host downloads, the others read its copy
        data = load_images(settings.source, settings.data)
    run.print(data.summary())
    train_set, search_set, test_set = build_datasets(data, settings)
    model = run.place(lambda: SuperNet(data.train.images.shape[1:], len(data.classes), settings))
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
    total_steps = run.count_steps(train_set)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.lr, total_steps=total_steps)
    run.track(model=model, optimizer=optimizer, schedule=schedule)

    for step in run.steps(train_set):
        path = settings.path or drawn_path(settings, step.number)
        step.run(model, loss_sum, forward=partial(walk, path=path))
        step.update(optimizer, schedule, clip=settings.clip)
        run.log(loss=step.loss)

    if settings.path:
        result = run.evaluate(model, test_set, measure, forward=partial(walk, path=settings.path))
        run.log(result)
        run.print(f"path {settings.path}: accuracy {result['accuracy']:.2%} on {len(test_set):,} held-out images")
        return
    found = evolve(settings, lambda path: run.evaluate(model, search_set, measure, forward=partial(walk, path=path)))
    ranked = sorted(found, key=lambda path: (-found[path], path))
    for name, path in {"best": ranked[0], "random": next(iter(found)), "worst": ranked[-1]}.items():
        run.log({f"{name}_path": path, f"{name}_accuracy": found[path]})
        run.print(f"{name:6}  {path}  accuracy {found[path]:.2%} with shared weights  ({describe(path)})")
    run.print(f"{len(found)} paths were compared. To train the best one from scratch: --set path={ranked[0]}")


def drawn_path(settings: Settings, step: int) -> str:
    """Draw the path of a step, uniformly: the same one for all micro-batches of the step, on all processes.

    It follows from the seed and the number of the step alone, so a resume draws the same paths. One path a step leaves
    the weights of all other operations without a gradient, and no optimizer changes them.
    """
    return random_path(settings, random.Random(f"path {settings.seed} {step}"))


def random_path(settings: Settings, draws: random.Random) -> str:
    """Draw an operation for each layer."""
    return "".join(draws.choice(sorted(OPERATIONS)) for _ in range(settings.layers))


def evolve(settings: Settings, score: Callable[[str], Mapping[str, float]]) -> dict[str, float]:
    """Return the accuracies of the paths that were compared, in the order of the search.

    The first generation is random. In each later one, half of the paths are mutants of a path of the best quarter so
    far, and half cross two of them. All processes draw the same paths, since they get the same scores.
    """
    draws, sizes = random.Random(f"search {settings.seed}"), operation_sizes(settings)
    largest = sum(max(layer.values()) for layer in sizes)
    found: dict[str, float] = {}
    for generation in range(settings.generations):
        best = sorted(found, key=lambda path: (-found[path], path))[: max(2, settings.population // 4)]
        candidates: list[str] = []
        for _ in range(100 * settings.population):  # a small space may have fewer paths that fit
            if len(candidates) == settings.population:
                break
            child = random_path(settings, draws)
            if generation and draws.random() < 0.5:
                child = "".join(map(draws.choice, zip(draws.choice(best), draws.choice(best), strict=True)))
            elif generation:
                mutated = zip(draws.choice(best), child, strict=True)
                child = "".join(new if draws.random() < MUTATION else old for old, new in mutated)
            size = sum(layer[operation] for layer, operation in zip(sizes, child, strict=True))
            if size <= settings.most * largest and child not in found and child not in candidates:
                candidates.append(child)
        found |= {path: score(path)["accuracy"] for path in candidates}
    return found


def build_datasets(data: ImageData, settings: Settings) -> tuple[ImageDataset, ImageDataset, ImageDataset]:
    """Build the sets for training (with augmentation), for the search, and for the end."""
    train, pixels = data.train.first(settings.train_images), data.train.images.float()
    mean, std = pixels.mean().item(), max(pixels.std().item(), 1.0)
    cut = len(train.labels) - int(settings.search_part * len(train.labels))
    search = ImageSplit(train.images[cut:], train.labels[cut:])
    shift = max(1, min(train.images.shape[2:]) // 28)  # 1 pixel of 28
    first = train if settings.path else train.first(cut)  # a path alone is not compared with others
    return (
        ImageDataset(first, mean, std, shift, data.mirror),
        ImageDataset(search, mean, std),
        ImageDataset(data.valid, mean, std),
    )


# -- the model


class Residual(nn.Sequential):
    """Layers whose input is added to their output."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def norm(channels: int) -> nn.Module:
    """Return group norm (arXiv 1803.08494). It has no statistics that would differ between paths, as batch norm has."""
    return nn.GroupNorm(channels // math.gcd(8, channels), channels)


def separable(channels: int, kernel: int) -> nn.Module:
    """Return a depthwise and a pointwise convolution (arXiv 1610.02357)."""
    depthwise = nn.Conv2d(channels, channels, kernel, padding=kernel // 2, groups=channels, bias=False)
    return Residual(norm(channels), nn.ReLU(), depthwise, nn.Conv2d(channels, channels, 1, bias=False))


def convolution(channels: int) -> nn.Module:
    """Return a convolution of all channels."""
    return Residual(norm(channels), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1, bias=False))


OPERATIONS: dict[str, Callable[[int], nn.Module]] = {
    "0": lambda channels: nn.Identity(),
    "1": partial(separable, kernel=3),
    "2": partial(separable, kernel=5),
    "3": convolution,
}
NAMES = {"0": "none", "1": "separable 3x3", "2": "separable 5x5", "3": "convolution 3x3"}
MUTATION = 0.2
"""Probability that a mutant has another operation in a layer."""


def describe(path: Sequence[str]) -> str:
    """Return the operations of a path in words."""
    return ", ".join(NAMES[operation] for operation in path)


def channels_of(settings: Settings, layer: int) -> int:
    """Return the channels of a layer."""
    return settings.width * (1 + (layer >= settings.layers // 2))


def operation_sizes(settings: Settings) -> list[dict[str, int]]:
    """Return the number of parameters of each operation, for each layer."""
    with torch.device("meta"):
        layers = [
            {name: build(channels_of(settings, n)) for name, build in OPERATIONS.items()}
            for n in range(settings.layers)
        ]
    return [{name: sum(p.numel() for p in built.parameters()) for name, built in layer.items()} for layer in layers]


class SuperNet(nn.Module):
    """All paths of the search, or the one of the settings, for images [channels, height, width]."""

    def __init__(self, shape: Sequence[int], classes: int, settings: Settings) -> None:
        super().__init__()
        stride, width = 2 if min(shape[1:]) >= 16 else 1, settings.width
        self.stem = nn.Conv2d(shape[0], width, 3, stride, padding=1, bias=False)
        paths = settings.path or [sorted(OPERATIONS)] * settings.layers
        self.layers = nn.ModuleList(
            nn.ModuleDict({name: OPERATIONS[name](channels_of(settings, layer)) for name in names})
            for layer, names in enumerate(paths)
        )
        self.widen = nn.Conv2d(width, 2 * width, 3, 2, padding=1, bias=False)  # before the second half
        self.head = nn.Sequential(norm(2 * width), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head.append(nn.Linear(2 * width, classes))

    def forward(self, images: Tensor, path: str) -> Tensor:
        """Map images [batch, channels, height, width] to logits [batch, classes] along a path."""
        x = self.stem(images)
        for number, (layer, operation) in enumerate(zip(self.layers, path, strict=True)):
            x = self.widen(x) if number == len(self.layers) // 2 else x
            x = layer.get_submodule(operation)(x)
        return self.head(x)


def walk(model: nn.Module, batch: tuple[Tensor, Tensor], path: str) -> Tensor:
    """Return the logits of a micro-batch along a path."""
    return model(batch[0], path)


def predict(settings: Settings, model: nn.Module, path: Path) -> unisono.Prediction:
    """Predict the class of each image of a folder, or of one image, along the path of the run."""
    if not settings.path:
        facts = "A super-network has the weights of all paths, and its search has named the best one."
        raise unisono.SettingsError("The run did not train a path alone.", facts, "unisono run supernet --set path=...")
    data = load_images(settings.source, settings.data)
    known = build_datasets(data, settings)[-1]
    return predict_images(path, data, known, lambda model, images: model(images, settings.path))


if __name__ == "__main__":
    unisono.main(main, Settings, predict=predict)
