"""Train a small network on shards of pictures. benchmarks/loaders.py starts this script in different ways."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

import unisono
from benchmarks.loader_arms import picture_and_label


@dataclass(frozen=True, kw_only=True)
class Settings(unisono.Settings):
    steps: int | None = 60
    batch: int = 48
    shards: str = ""
    checkpoint: unisono.CheckpointSettings = field(default_factory=lambda: unisono.CheckpointSettings(every=10))


def network() -> nn.Module:
    """Build the model."""
    layers = [nn.Conv2d(3, 8, 3, 4), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()]
    return nn.Sequential(*layers, nn.Dropout(0.1), nn.Linear(128, 10))


def main(run: unisono.Run[Settings]) -> None:
    train_set = unisono.Stream.indexed(run.settings.shards, window=500, map=picture_and_label)
    model = run.place(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(train_set):
        for x, y in step:
            step.backward(F.cross_entropy(model(x / 255), y, reduction="sum"), weight=len(y))
        step.update(optimizer)
        run.log(loss=step.loss)


if __name__ == "__main__":
    unisono.main(main, Settings)
