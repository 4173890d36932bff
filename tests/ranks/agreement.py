"""A small GPT as in the text recipe, trained a few steps, and what came of it as whole tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from unisono.checkpoint.sharded_state import gather_tensor
from unisono.config import Settings
from unisono.distributed.init import join_process_group as join
from unisono.environment import World
from unisono.testing import build_run, close_run, run_promise

VOCABULARY, LENGTH = 24, 12


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm_look, self.norm_think = nn.RMSNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.look = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.query_key_value(self.norm_look(x)).unflatten(-1, (-1, 3, self.head_width))
        query, key, value = qkv.permute(3, 0, 2, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.look(seen.transpose(1, 2).flatten(2)))
        out: torch.Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm_think(x)))))
        return out


class GPT(nn.Module):
    """Tied weights, two kinds of norm, a matrix with a bias and one without."""

    def __init__(self, width: int = 16, heads: int = 4, depth: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out


class Sentences(torch.utils.data.Dataset):
    """Sequences of numbers in which each follows from the one before, nearly."""

    def __init__(self, count: int = 60, length: int = LENGTH) -> None:
        g = torch.Generator().manual_seed(9)
        steps = torch.randint(1, 4, (count, length + 1), generator=g)
        self.rows = steps.cumsum(1) % VOCABULARY

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rows[i, :-1], self.rows[i, 1:]


class Came(NamedTuple):
    """What came of a training: losses and norms by step, the first step's gradients, the weights at the end."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Any]
    weights: dict[str, Any]
    fingerprint: str
    promise: tuple[str, str]


def score(output: torch.Tensor, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


def come(
    world: World,
    folder: str,
    config: Settings,
    build: Any = GPT,
    plan: Any = None,
    resume: bool = False,
    length: int = LENGTH,
) -> Came:
    """Train on this rank."""
    with join(world) as group:
        run = build_run(config, world, group, Path(folder), resume=resume, verified=True)
        model = run.place(build, **({"plan": plan()} if plan else {}))
        # not Adam: a gradient that is zero but for rounding (of the keys' bias) would move weights by its sign
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        run.track(model=model, optimizer=optimizer)
        losses, norms, gradients = [], [], {}
        for step in run.steps(Sentences(length=length)):
            step.run(model, score)
            if not step.number:
                gradients = {n: gather_tensor(p.grad).detach().clone().numpy() for n, p in model.named_parameters()}
            norms.append(step.grad_norm)
            step.update(optimizer)
            losses.append(step.loss)
        run.log(run.evaluate(model, Sentences(7, length), score))
        losses.append(run.context.progress.results["score"])
        weights = {n: gather_tensor(p).detach().clone().numpy() for n, p in model.named_parameters()}
        came = Came(losses, norms, gradients, weights, run.context.state.fingerprint(), run_promise(run))
        close_run(run)
        return came


def error(mine: Any, truth: Any) -> float:
    """The relative error of one array, in float64 norms."""
    mine, truth = torch.tensor(mine, dtype=torch.float64), torch.tensor(truth, dtype=torch.float64)
    return float((mine - truth).norm() / truth.norm().clamp(min=1e-30))


def agree(came: Came, truth: Came) -> None:
    """Losses to 1e-6, every gradient and the norm to 1e-5, the weights in the end too."""
    for mine, true in zip(came.losses, truth.losses, strict=True):
        assert abs(mine - true) <= 1e-6 * abs(true)
    assert came.gradients.keys() == truth.gradients.keys()
    for name, grad in came.gradients.items():
        assert error(grad, truth.gradients[name]) <= 1e-5, name
    assert abs(came.norms[0] - truth.norms[0]) <= 1e-5 * truth.norms[0]
    for name, weight in came.weights.items():
        assert error(weight, truth.weights[name]) <= 1e-5, name
