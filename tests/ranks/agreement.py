"""Train a small GPT, as in the text recipe, for a few steps, and compare results as full tensors."""

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
    """A GPT with tied weights, two kinds of norm, and matrices with and without bias."""

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
    """Sequences of tokens that increase by 1 to 3."""

    def __init__(self, count: int = 60, length: int = LENGTH) -> None:
        g = torch.Generator().manual_seed(9)
        steps = torch.randint(1, 4, (count, length + 1), generator=g)
        self.rows = steps.cumsum(1) % VOCABULARY

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rows[i, :-1], self.rows[i, 1:]


class TrainResult(NamedTuple):
    """Losses and norms by step, gradients of the first step, and final weights."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Any]
    weights: dict[str, Any]
    fingerprint: str
    promise: tuple[str, str]


def score(output: torch.Tensor, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


def train_gpt(
    world: World,
    folder: str,
    config: Settings,
    build: Any = GPT,
    plan: Any = None,
    resume: bool = False,
    length: int = LENGTH,
) -> TrainResult:
    """Train on this rank."""
    with join(world) as group:
        run = build_run(config, world, group, Path(folder), resume=resume, verified=True)
        model = run.place(build, **({"plan": plan()} if plan else {}))
        # Not Adam: the gradient of the key bias is zero plus rounding, and Adam would update by its sign.
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
        result = TrainResult(losses, norms, gradients, weights, run.context.state.fingerprint(), run_promise(run))
        close_run(run)
        return result


def error(actual: Any, expected: Any) -> float:
    """Return the relative error of an array, in float64 norms."""
    actual, expected = torch.tensor(actual, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64)
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-30))


def assert_agree(actual: TrainResult, expected: TrainResult) -> None:
    """Check relative errors: 1e-6 for losses, 1e-5 for gradients, the first norm and the weights."""
    for loss, expected_loss in zip(actual.losses, expected.losses, strict=True):
        assert abs(loss - expected_loss) <= 1e-6 * abs(expected_loss)
    assert actual.gradients.keys() == expected.gradients.keys()
    for name, grad in actual.gradients.items():
        assert error(grad, expected.gradients[name]) <= 1e-5, name
    assert abs(actual.norms[0] - expected.norms[0]) <= 1e-5 * expected.norms[0]
    for name, weight in actual.weights.items():
        assert error(weight, expected.weights[name]) <= 1e-5, name
