"""The models of the GPU benchmarks: a GPT of 124 million parameters, a ResNet-50, and an MLP of three small layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from benchmarks.tasks import mlp


class Block(nn.Module):
    """Causal attention and a feed-forward network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        size, length, width = x.shape
        qkv = self.qkv(self.first(x)).view(size, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = qkv
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(size, length, width))
        return x + self.down(F.gelu(self.up(self.second(x))))


class GPT(nn.Module):
    """A GPT-2 with tied embeddings."""

    def __init__(self, width: int, depth: int, heads: int, context: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


class Bottleneck(nn.Module):
    """Three convolutions with batch norm, and a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            *(nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)),
        )
        same = stride == 1 and inputs == 4 * width
        self.shortcut: nn.Module = nn.Identity()
        if not same:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.path(x) + self.shortcut(x))


def resnet(depths: tuple[int, ...], width: int) -> nn.Module:
    """Build a ResNet of bottlenecks for images of three channels: depths (3, 4, 6, 3) and width 64 are ResNet-50."""
    stem = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    layers, inputs = list[nn.Module](stem), width
    for stage, depth in enumerate(depths):
        for number in range(depth):
            inner = width << stage
            layers.append(Bottleneck(inputs, inner, 2 if stage and not number else 1))
            inputs = 4 * inner
    return nn.Sequential(*layers, nn.Flatten(2), Mean(), nn.Linear(inputs, 1000))


class Mean(nn.Module):
    """The mean over pixels. Unlike nn.AdaptiveAvgPool2d it has a deterministic backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(-1)


@dataclass(frozen=True)
class Task:
    """A model, its data, the batch, and floating-point operations per sample (forward and backward)."""

    build: Callable[[], nn.Module]
    data: Callable[[int], Dataset[tuple[Tensor, ...]]]
    batch: int
    precision: str
    unit: str
    units: int
    flops: float = 0.0


def tokens(length: int, context: int, vocabulary: int) -> Dataset[tuple[Tensor, ...]]:
    found = torch.randint(0, vocabulary, (length, context + 1))
    return TensorDataset(found[:, :-1].contiguous(), found[:, 1:].contiguous())


def images(length: int, side: int) -> Dataset[tuple[Tensor, ...]]:
    return TensorDataset(torch.randn(length, 3, side, side), torch.randint(0, 1000, (length,)))


def points(length: int) -> Dataset[tuple[Tensor, ...]]:
    return TensorDataset(torch.randn(length, 32), torch.randint(0, 32, (length,)))


def tasks(*, small: bool) -> dict[str, Task]:
    """Return the tasks; `small`: of the same kind, for a dry run."""
    width, depth, context, vocabulary = (32, 2, 32, 64) if small else (768, 12, 1024, 50304)
    side, depths, channels = (32, (1, 1, 1, 1), 8) if small else (224, (3, 4, 6, 3), 64)
    parameters = 12 * depth * width**2 + vocabulary * width
    return {
        "GPT": Task(
            lambda: GPT(width, depth, 2 if small else 12, context, vocabulary),
            lambda length: tokens(length, context, vocabulary),
            batch=16,  # with two graphs, all loops fit into 80 GB
            precision="bf16",
            unit="tokens",
            units=context,
            flops=context * (6.0 * parameters + 12 * depth * width * context),
        ),
        "ResNet-50": Task(
            lambda: resnet(depths, channels),
            lambda length: images(length, side),
            batch=32 if small else 256,
            precision="bf16",
            unit="images",
            units=1,
            flops=3 * 2 * 4.09e9,
        ),
        "MLP": Task(lambda: mlp(32, 32, 32), points, batch=64, precision="fp32", unit="samples", units=1),
    }


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, -2), target.flatten(), reduction="sum")
