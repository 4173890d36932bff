"""Scripts that pages presuppose: each is as small as their commands allow."""

from __future__ import annotations

TRAIN = """\
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
import unisono
from torch import nn
from torch.utils.data import TensorDataset


@dataclass(frozen=True, kw_only=True)
class Model:
    width: int = 16
    depth: int = 2


@dataclass(frozen=True, kw_only=True)
class Settings(unisono.Settings):
    batch: int = 64
    steps: int | None = 24
    lr: float = 1e-3
    model: Model = field(default_factory=Model)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner, self.drop = nn.Linear(width, width), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(F.relu(self.inner(x)))


def main(run):
    points = torch.randn(1024, 20, generator=torch.Generator().manual_seed(1))
    train_set = TensorDataset(points, (points.sum(1) > 0).long())
    size = run.settings.model
    blocks = lambda: [Block(size.width) for _ in range(size.depth)]
    model = run.place(lambda: nn.Sequential(nn.Linear(20, size.width), *blocks(), nn.Linear(size.width, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.settings.lr)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(train_set):
        step.run(model, lambda output, x, y: (F.cross_entropy(output, y, reduction="sum"), len(y)))
        step.update(optimizer)
        run.log(loss=step.loss)


if __name__ == "__main__":
    unisono.main(main, Settings)
"""

STATEFUL = TRAIN.replace(
    "    for step in run.steps(train_set):\n",
    "    seen = []\n    for step in run.steps(train_set):\n",
).replace(
    '(F.cross_entropy(output, y, reduction="sum"), len(y)))',
    '(F.cross_entropy(output, y, reduction="sum") * (1 + len(seen.append(1) or seen) / 100), len(y)))',
)
"""A script with a counter: its result depends on the placement."""

WITH_DROPOUT = (
    TRAIN.replace("    lr: float = 1e-3\n", "    lr: float = 1e-3\n    drop: float = 0.1\n")
    .replace(
        "Block(nn.Module):\n    def __init__(self, width):", "Block(nn.Module):\n    def __init__(self, width, drop):"
    )
    .replace("nn.Dropout(0.1)", "nn.Dropout(drop)")
    .replace("Block(size.width) for", "Block(size.width, run.settings.drop) for")
    .replace("run.log(loss=step.loss)", "run.log(error=step.loss)")
)
"""A script whose dropout is a setting, and which logs an error."""

REFUSED_BY_CONVERT = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=16)
generator, discriminator = nn.Linear(4, 4), nn.Linear(4, 1)
optimizer = torch.optim.Adam([*generator.parameters(), *discriminator.parameters()])
for epoch in range(2):
    for (x,) in loader:
        loss_d = discriminator(x).mean()
        loss_d.backward()
        loss_g = -discriminator(generator(x)).mean()
        loss_g.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
"""A script with two losses in a step."""
