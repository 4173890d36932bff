"""Models and data of the benchmarks. Data is random, so that loading it takes no time.

This module imports only torch, for benchmarks that measure the time to start. The GPT is the text recipe's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset


def mlp(*widths: int) -> nn.Module:
    return nn.Sequential(nn.Linear(widths[0], widths[1]), nn.ReLU(), nn.Linear(widths[1], widths[2]))


class Points(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A custom data set, which is read sample by sample."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


class Norm(nn.GroupNorm):
    def __init__(self, channels: int) -> None:
        super().__init__(8, channels)


class Residual(nn.Module):
    """Two 3x3 convolutions with a shortcut: the identity, or a 1x1 convolution if the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            Norm(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            Norm(outputs),
        )
        same_shape = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same_shape else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.path(x) + self.shortcut(x))


def cnn() -> nn.Module:
    """Build a residual network for 32x32 images, without batch norm."""
    widths = (32, 32, 32, 64, 64, 128, 128, 256, 256)
    blocks = [Residual(a, b, 1 if a == b else 2) for a, b in itertools.pairwise(widths)]
    stem = nn.Conv2d(3, widths[0], 3, 1, 1, bias=False)
    return nn.Sequential(stem, Norm(widths[0]), nn.ReLU(), *blocks, nn.AvgPool2d(4), nn.Flatten(), nn.Linear(256, 10))


def gpt() -> nn.Module:
    """Build the text recipe's model, wider and deeper."""
    from unisono.recipes.text import GPT, Model

    return GPT(Model(width=384, depth=6, heads=6, context=128))


def text(length: int) -> Dataset[Any]:
    tokens = torch.randint(0, 256, (length, 129))
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def images(length: int) -> Dataset[Any]:
    return TensorDataset(torch.randn(length, 3, 32, 32), torch.randint(0, 10, (length,)))


@dataclass(frozen=True)
class Task:
    """A model, its data, and the global batch size."""

    build: Callable[[], nn.Module]
    data: Callable[[int], Dataset[Any]]
    batch: int


TASKS = {"GPT": Task(gpt, text, 16), "CNN": Task(cnn, images, 32)}


def loss_of(output: torch.Tensor, target: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten(), reduction=reduction)
