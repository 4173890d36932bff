"""Small models, data sets and a training loop for the tests of this folder."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from unisono.config import Settings
from unisono.distributed.init import join_process_group as join
from unisono.environment import World
from unisono.testing import build_run, close_run, reassign, run_result
from unisono.train.run import Run


class Points(torch.utils.data.Dataset):
    """Points with a class each. Reading a sample draws noise, so results depend on keyed random numbers."""

    def __init__(self, length: int, width: int = 12, classes: int = 5) -> None:
        g = torch.Generator().manual_seed(3)
        self.x = torch.randn(length, width, generator=g)
        self.y = (self.x @ torch.randn(width, classes, generator=g)).argmax(1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[i] + 0.01 * torch.randn(self.x.shape[1]), self.y[i]


def tensors(length: int) -> torch.utils.data.TensorDataset:
    """Return the points without noise as a TensorDataset."""
    points = Points(length)
    return torch.utils.data.TensorDataset(points.x, points.y)


class Sentences(torch.utils.data.Dataset):
    """Random sequences of 3 to 12 tokens."""

    def __init__(self, length: int, vocabulary: int = 23) -> None:
        g = torch.Generator().manual_seed(5)
        self.rows = [
            torch.randint(0, vocabulary, (int(n),), generator=g) for n in torch.randint(3, 13, (length,), generator=g)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.rows[i]


class Sometimes(Points):
    """Points that draw noise for some samples only, from several generators."""

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        draw = {0: random.random, 1: lambda: random.gauss(0, 1), 2: np.random.randn, 3: lambda: float(torch.randn(()))}
        return self.x[i] + 0.01 * draw.get(i % 30, float)(), self.y[i]


class Weighted(torch.utils.data.Dataset):
    """A data set drawn by weights, with replacement, as in docs/guide/data.md."""

    def __init__(self, length: int) -> None:
        self.data, self.ends = Points(length), torch.arange(1, length + 1, dtype=torch.float64).cumsum(0)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, _: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = torch.rand((), dtype=torch.float64) * self.ends[-1]
        return self.data[int(torch.searchsorted(self.ends, drawn, right=True))]


WITHOUT_DROPOUT = " without dropout"
"""Ends the kind of a model without dropout."""

DATA: dict[str, Callable[[int], Any]] = {
    "mlp": Points,
    "sometimes": Sometimes,
    "tensors": tensors,
    "gpt": Sentences,
    "weighted": Weighted,
}


def padded(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = nn.utils.rnn.pad_sequence([row[:-1] for row in rows], batch_first=True)
    targets = nn.utils.rnn.pad_sequence([row[1:] for row in rows], batch_first=True, padding_value=-100)
    return tokens, targets


class MLP(nn.Sequential):
    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__(nn.Linear(12, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 5))


class TinyGPT(nn.Module):
    """A transformer with tied weights, variable length, a frozen parameter, and an unused layer."""

    def __init__(self, vocabulary: int = 23, width: int = 16, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.place = nn.Parameter(torch.randn(16, width) * 0.02, requires_grad=False)
        self.block = nn.TransformerEncoderLayer(width, 2, 32, dropout, batch_first=True, norm_first=True)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        n = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(n)
        x = self.embed(tokens) + self.place[:n]
        return self.head(self.block(x, src_mask=mask, is_causal=True))


def settings(**changes: Any) -> Settings:
    return replace(Settings(steps=8, batch=16, virtual_ranks=8), **changes)


def train(
    world: World,
    kind: str,
    config: Settings,
    run_dir: str,
    length: int = 101,
    resume: bool = False,
    deals: dict[int, Any] | None = None,
    stop_after: int | None = None,
    noise: bool = False,
) -> dict[str, Any]:
    """Train on this rank, and return losses, gradient norms, the result, and the number of computed micro-batches."""
    torch.manual_seed(world.rank)  # the result must not depend on this seed
    with join(world) as group:
        run = build_run(config, world, group, Path(run_dir), resume=resume)
        out = loop(run, kind, length, deals or {}, stop_after, noise)
        close_run(run)
        return out | {"result": run_result(run), "state": run.context.state.fingerprint()}


def loop(
    run: Run[Settings], kind: str, length: int, deals: dict[int, Any], stop_after: int | None, noise: bool
) -> dict[str, Any]:
    build = TinyGPT if kind.startswith("gpt") else MLP
    data = DATA[kind.removesuffix(WITHOUT_DROPOUT)](length)
    model = run.place(partial(build, dropout=0.0) if kind.endswith(WITHOUT_DROPOUT) else build)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    run.track(model=model, optimizer=optimizer, schedule=schedule)
    losses, norms, rounds, held = [], [], 0, {}
    for step in run.steps(data, collate_fn=padded if build is TinyGPT else None):
        if step.number in deals:
            held[step.number] = reassign(run, deals[step.number])
        louder = 1 + np.random.rand() * random.random() if noise else 1.0
        for x, y in step:
            rounds += 1
            out = model(x)
            loss = F.cross_entropy(out.flatten(0, -2), y.flatten(), reduction="sum", ignore_index=-100)
            step.add("right", (out.argmax(-1) == y).sum(), y.numel())
            step.backward(loss, weight=(y != -100).sum())
        norms.append(step.grad_norm)
        for p in model.parameters():
            if noise and p.grad is not None:
                p.grad += 0.01 * louder * torch.randn_like(p.grad)
        step.update(optimizer, schedule)
        losses.append(step.loss)
        run.log(right=step.mean("right"))
        if step.number + 1 == stop_after:
            run.stop()
    unused = model.unused.weight.grad if isinstance(model, TinyGPT) else None
    return {"losses": losses, "norms": norms, "rounds": rounds, "held": held, "unused": unused, "copies": copies(run)}


def copies(run: Run[Settings]) -> int:
    assert run.context.parts is not None
    pools = [getattr(gradient.exchange, "pool", None) for gradient in run.context.parts.sync.gradients]
    return sum(pool.created for pool in pools if pool)
