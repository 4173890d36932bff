"""A training script with planted bottlenecks, one at a time (--set plant=NAME): see __main__.py."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import unisono

TILE, PRODUCT = torch.ones(96, 96), torch.empty(96, 96)


@dataclass(frozen=True, kw_only=True)
class Settings(unisono.Settings):
    """The settings of the planted script.

    Attributes:
        plant: what slows the run down.
        width: of the model.
        depth: number of its layers.
        cost: how much of it: milliseconds, or a number of things.
        every: steps between two of them.
        length: samples in an epoch.
    """

    steps: int | None = 100
    batch: int = 8
    virtual_ranks: int = 2
    plant: str = "nothing"
    width: int = 256
    depth: int = 4
    cost: float = 5.0
    every: int = 1
    length: int = 4096


class Samples(Dataset[Any]):
    """Random samples, each of which costs time if that is planted."""

    def __init__(self, settings: Settings) -> None:
        self.plant, self.seconds, self.width = settings.plant, settings.cost / 1000, settings.width
        self.length = settings.length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.plant == "decoding":
            burn(self.seconds)
        elif self.plant == "storage":
            time.sleep(self.seconds)
        torch.manual_seed(index)
        x = torch.randn(self.width)
        return x, x.roll(1)


class Block(nn.Module):
    """A layer that takes a fixed processor time for each sample, or is computed several times, if that is planted."""

    def __init__(self, settings: Settings, rank: int) -> None:
        super().__init__()
        self.layer = nn.Linear(settings.width, settings.width)
        self.seconds = settings.cost / 1000 if settings.plant == "per-sample" else 0.0
        self.again = int(settings.cost) if settings.plant == "slow-rank" and rank == 1 else 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.seconds:
            burn(self.seconds * len(x))
        with torch.no_grad():
            for _ in range(self.again):
                self.layer(x)
        return torch.relu(self.layer(x)) + x


def burn(seconds: float) -> None:
    """Use a processor for some seconds of its running time, whatever else it runs.

    torch's operators release the interpreter lock, as in any model, so that other threads can pass messages on.
    """
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        torch.mm(TILE, TILE, out=PRODUCT)


def main(run: unisono.Run[Settings]) -> None:
    """Train."""
    s = run.settings
    torch.manual_seed(0)
    data = Samples(s)
    held_out = [data[i] for i in range(int(s.cost))] if s.plant == "evaluations" else []
    model = run.place(lambda: nn.Sequential(*[Block(s, run.rank) for _ in range(s.depth)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    kept: list[Any] = []
    if s.plant in ("garbage", "frozen"):
        kept += [{"name": [i]} for i in range(int(s.cost) * 1000)]
    if s.plant == "frozen":
        gc.collect()
        gc.freeze()
    for step in run.steps(data):
        step.run(model, error)
        step.update(optimizer)
        if s.plant in ("garbage", "frozen") and step.number % s.every == 0:
            gc.collect()
        if s.plant == "script" and step.number % s.every == 0:
            burn(s.cost / 1000)
        if s.plant == "evaluations" and step.every(s.every):
            run.evaluate(model, held_out, error)
    del kept


def error(output: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the sum of errors of a batch, and its weight."""
    return (output - y).square().mean(1).sum(), len(x)


if __name__ == "__main__":
    unisono.main(main, Settings)
