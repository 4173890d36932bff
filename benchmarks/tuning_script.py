"""The script of the studies of benchmarks/tuning.py: a network that learns another one, with noise in its labels."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

import unisono

WIDTH = 16


@dataclass(frozen=True, kw_only=True)
class Settings(unisono.Settings):
    steps: int | None = 60
    batch: int = 64
    lr: float = 0.01
    decay: float = 0.01
    depth: int = 2
    width: int = 64


def data(seed: int, length: int) -> torch.utils.data.TensorDataset:
    """Return inputs, and classes that a random network gives them; a tenth of the classes are random."""
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(WIDTH, 24, generator=generator), torch.randn(24, 4, generator=generator)
    generator.manual_seed(seed)
    x = torch.randn(length, WIDTH, generator=generator)
    y = (torch.tanh(x @ first) @ second).argmax(1)
    noise = torch.rand(length, generator=generator) < 0.1
    return torch.utils.data.TensorDataset(x, torch.where(noise, torch.randint(4, (length,), generator=generator), y))


def loss_of(output: Tensor, _: Tensor, y: Tensor) -> tuple[Tensor, int]:
    return nn.functional.cross_entropy(output, y, reduction="sum"), len(y)


def build(settings: Settings) -> nn.Module:
    widths = [WIDTH, *[settings.width] * settings.depth]
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 4))


def main(run: unisono.Run[Settings]) -> None:
    settings = run.settings
    model = run.place(lambda: build(settings))
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=settings.decay)
    run.track(model=model, optimizer=optimizer)
    valid = data(2, 1024)
    for step in run.steps(data(1, 2048)):
        step.run(model, loss_of)
        step.update(optimizer)
        if step.every(2):
            run.log(run.evaluate(model, valid, lambda *batch: {"valid": loss_of(*batch)}))


if __name__ == "__main__":
    unisono.main(main, Settings)
