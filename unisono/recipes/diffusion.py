"""Train a diffusion model that draws digits: a small U-Net, an average of its weights, and samples by class.

    unisono run diffusion --ranks 2                                     the 1,797 digits of scikit-learn
    unisono run diffusion --ranks 2 --set source=fashion                clothes, in more time
    unisono copy diffusion mine.py                                      then edit it and: unisono run mine.py

Data     images of 8x8 pixels in ten classes; or Fashion-MNIST, or your own folder, as for the image recipe
Method   DDPM (arXiv 2006.11239) with a cosine schedule; the class is given to the model; samples by DDIM (2010.02502)
Result   95 % of drawn digits look like their class, and the Frechet distance of pixels from held-out images is 0.55
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import unisono
from unisono.recipes.datasets.images import ImageSplit, load_images


@dataclass(frozen=True, kw_only=True)
class Settings(unisono.Settings):
    source: Literal["auto", "fashion", "digits"] = "digits"  # data set; auto: digits if fashion is unavailable
    data: Path | None = None  # your own data set: a folder with one folder of images per class
    batch: int = 128
    epochs: int | None = 80
    lr: float = 2e-3  # peak learning rate of the one-cycle schedule
    clip: float | None = 1.0
    times: int = 200  # times of the diffusion, from an image to noise
    width: int = 32  # channels at the full resolution; twice as many below
    average: float = 0.995  # part of the averaged weights that a step keeps
    samples: int = 500  # images to draw after training, equally many of each class
    draw_steps: int = 25  # steps in which an image is drawn

    def __post_init__(self) -> None:
        """Refuse values and parallelism that this model does not support."""
        if not 1 <= self.draw_steps <= self.times:
            raise unisono.SettingsError(
                f"The diffusion recipe cannot have draw_steps={self.draw_steps} with times={self.times}.",
                "Each step of drawing goes from one time to an earlier one.",
                f"--set draw_steps={min(25, max(1, self.times))}",
            )
        self.parallel.refuse(
            "The diffusion recipe", "A U-Net of convolutions is no chain of layers, and an image is no sequence."
        )


def main(run: unisono.Run[Settings]) -> None:
    settings = run.settings
    with run.first():  # one process per host downloads, the others read its copy
        data = load_images(settings.source, settings.data)
    run.print(data.summary())
    train_set, valid_set = (TensorDataset(scaled(split), split.labels) for split in (data.train, data.valid))
    shape, classes = data.train.images.shape[1:], len(data.classes)
    noised = Diffusion(settings.times)

    model = run.place(lambda: UNet(shape[0], classes, settings.width))
    average = run.place(lambda: UNet(shape[0], classes, settings.width).requires_grad_(False))
    average.load_state_dict(model.state_dict())
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.lr, total_steps=run.count_steps(train_set))
    run.track(model=model, average=average, optimizer=optimizer, schedule=schedule)

    for step in run.steps(train_set):
        step.run(model, squares, forward=noised.errors)
        step.update(optimizer, schedule)
        keep = min(settings.average, (1 + step.number) / (10 + step.number))  # the first weights are soon forgotten
        with torch.no_grad():
            for a, p in zip(average.parameters(), model.parameters(), strict=True):
                a.lerp_(p, 1 - keep)
        run.log(loss=step.loss)

    def draw(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return noised.draw(model, batch[0], tuple(shape), settings.draw_steps)

    labels = torch.arange(settings.samples) % classes
    result = run.evaluate(average, valid_set, squares, forward=noised.errors)
    drawn = run.predict(average, TensorDataset(labels), forward=draw)
    train, valid = train_set.tensors[0], valid_set.tensors[0]
    of_drawn, of_valid = (nearest(images, train, data.train.labels) for images in (drawn, valid))
    run.log(
        valid_loss=result["squares"],
        recognized=(of_drawn == labels).double().mean().item(),
        recognized_valid=(of_valid == data.valid.labels).double().mean().item(),
        frechet=frechet_distance(drawn, valid),
        frechet_train=frechet_distance(train, valid),
    )
    run.log_image("drawn", picture(drawn, min(classes, 16)))
    run.print(
        f"validation: noise loss {result['squares']:.4f}; {(of_drawn == labels).double().mean():.1%} of {len(drawn)} "
        f"drawn images look like their class (of real ones: {(of_valid == data.valid.labels).double().mean():.1%}); "
        f"Frechet distance {frechet_distance(drawn, valid):.2f} (of the training images: "
        f"{frechet_distance(train, valid):.2f})"
    )


def scaled(split: ImageSplit) -> Tensor:
    """Return the pixels from -1 to 1: float32 [images, channels, height, width]."""
    return split.images.float() / 127.5 - 1


def squares(output: Tensor, images: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """Return the sum of the squared errors of the noise, and the number of pixels."""
    return output.square().sum(), output.numel()


class Diffusion:
    """Noise by time: an image keeps sqrt(a) of itself and gets sqrt(1 - a) of noise."""

    def __init__(self, times: int) -> None:
        wave = torch.cos((torch.linspace(0, 1, times + 1, dtype=torch.float64) + 0.008) / 1.008 * math.pi / 2).square()
        self.kept = (wave / wave[0]).clamp(1e-4, 0.9999).float()  # a, for times 0 to `times` (arXiv 2102.09672)

    def errors(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        """Return the errors of the noise that the model finds in images, each at a random time.

        Times and noise are torch's own random numbers. The run seeds them for each micro-batch.
        """
        images, labels = batch
        times = torch.randint(1, len(self.kept), (len(images),), device=images.device)
        noise = torch.randn_like(images)
        kept = self.kept.to(images.device)[times, None, None, None]
        return model(kept.sqrt() * images + (1 - kept).sqrt() * noise, times / len(self.kept), labels) - noise

    def draw(self, model: nn.Module, labels: Tensor, shape: tuple[int, ...], steps: int) -> Tensor:
        """Draw an image for each label: begin with noise, and take away the noise that the model finds (DDIM)."""
        images = torch.randn(len(labels), *shape, device=labels.device)
        times = torch.linspace(len(self.kept) - 1, 0, steps + 1).round().long().tolist()
        for now, then in itertools.pairwise(times):
            kept, later = self.kept[now].item(), self.kept[then].item()
            time = torch.full((len(labels),), now / len(self.kept), device=labels.device)
            noise = model(images, time, labels)
            clean = ((images - math.sqrt(1 - kept) * noise) / math.sqrt(kept)).clamp(-1, 1)
            noise = (images - math.sqrt(kept) * clean) / math.sqrt(1 - kept)
            images = clean if then == 0 else math.sqrt(later) * clean + math.sqrt(1 - later) * noise
        return images


class UNet(nn.Module):
    """Convolutions at the full and at half the resolution, with a shortcut between the two halves of the network."""

    def __init__(self, channels: int, classes: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, 4 * width))
        self.label = nn.Embedding(classes, 4 * width)
        self.first = nn.Conv2d(channels, width, 3, padding=1)
        self.down = Block(width, width, width)
        self.halve = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.middle, self.middle_2 = Block(2 * width, 2 * width, width), Block(2 * width, 2 * width, width)
        self.up = Block(3 * width, width, width)
        self.norm = nn.GroupNorm(8, width)
        self.last = nn.Conv2d(width, channels, 3, padding=1)
        nn.init.zeros_(self.last.weight)

    def forward(self, images: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        """Map images [batch, channels, height, width], times [batch] from 0 to 1 and labels [batch] to their noise."""
        rates = torch.exp(torch.linspace(0, math.log(1000), self.width // 2, device=times.device))
        angles = times[:, None] * rates
        about = F.silu(self.time(torch.cat((angles.sin(), angles.cos()), dim=1)) + self.label(labels))
        high = self.down(self.first(images), about)
        low = self.middle_2(self.middle(self.halve(high), about), about)
        both = torch.cat((F.interpolate(low, size=high.shape[2:]), high), dim=1)
        return self.last(F.silu(self.norm(self.up(both, about))))


class Block(nn.Module):
    """Two convolutions with a residual connection. Time and label shift the channels between the two."""

    def __init__(self, inputs: int, outputs: int, width: int) -> None:
        super().__init__()
        self.norm, self.norm_2 = nn.GroupNorm(8, inputs), nn.GroupNorm(8, outputs)
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv_2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shift = nn.Linear(4 * width, outputs)
        self.past = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, about: Tensor) -> Tensor:
        y = self.conv(F.silu(self.norm(x))) + self.shift(about)[:, :, None, None]
        return self.past(x) + self.conv_2(F.silu(self.norm_2(y)))


# -- quality of drawn images


def nearest(images: Tensor, known: Tensor, labels: Tensor) -> Tensor:
    """Return the label of the nearest known image, by the distance of pixels: [images]."""
    return labels[torch.cdist(images.flatten(1).double(), known.flatten(1).double()).argmin(1)]


def frechet_distance(images: Tensor, others: Tensor) -> float:
    """Return the Frechet distance of two sets of images, as if pixels were normally distributed (arXiv 1706.08500)."""
    (mean, cov), (mean_2, cov_2) = (
        (x.mean(0), torch.cov(x.T)) for x in (y.flatten(1).double() for y in (images, others))
    )
    values, vectors = torch.linalg.eigh(cov)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    shared = torch.linalg.eigvalsh(root @ cov_2 @ root).clamp(min=0).sqrt().sum()
    return ((mean - mean_2).square().sum() + cov.trace() + cov_2.trace() - 2 * shared).item()


def picture(images: Tensor, columns: int) -> Tensor:
    """Return the first images as one, with a class in each column: [channels, height, width], from 0 to 1."""
    rows = min(8, len(images) // columns)
    first = images[: rows * columns].unflatten(0, (rows, columns)) / 2 + 0.5
    return first.permute(2, 0, 3, 1, 4).flatten(3).flatten(1, 2).clamp(0, 1)


if __name__ == "__main__":
    unisono.main(main, Settings)
