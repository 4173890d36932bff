"""Operators on a GPU: those without a deterministic kernel are named, and the rest give the same bits each time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.gpu.conftest import Gpu
from unisono.config import PromiseSettings
from unisono.errors import LoopError
from unisono.train.guarantees.deterministic_kernels import fix_kernels, name_unrepeatable_operator

Operator = Callable[[torch.device], Tensor]
"""Compute a number of which the gradient is then computed."""


def images(device: torch.device) -> Tensor:
    return torch.randn(4, 8, 30, 30, device=device, requires_grad=True)


def ctc(device: torch.device) -> Tensor:
    log_probs = torch.randn(50, 16, 20, device=device, requires_grad=True).log_softmax(2)
    targets = torch.randint(1, 20, (16, 30), device=device)
    lengths = torch.full((16,), 50, device=device), torch.randint(10, 30, (16,), device=device)
    return F.ctc_loss(log_probs, targets, *lengths)


def pixels(device: torch.device) -> Tensor:
    target = torch.randint(0, 8, (4, 30, 30), device=device)
    return F.cross_entropy(images(device), target)


def grid(device: torch.device) -> Tensor:
    return F.grid_sample(images(device), torch.rand(4, 9, 9, 2, device=device), align_corners=False).square().sum()


def largest_of_bags(device: torch.device) -> Tensor:
    bags = torch.randint(0, 20, (16, 12), device=device)
    return nn.EmbeddingBag(20, 8, mode="max", device=device)(bags).square().sum()


UNREPEATABLE: dict[str, Operator] = {
    "ctc_loss": ctc,
    "nll_loss2d": pixels,
    "adaptive_avg_pool": lambda device: F.adaptive_avg_pool2d(images(device), 7).square().sum(),
    "adaptive_max_pool": lambda device: F.adaptive_max_pool2d(images(device), 7).square().sum(),
    "reflection_pad": lambda device: F.pad(images(device), (3, 3, 3, 3), "reflect").square().sum(),
    "replication_pad": lambda device: F.pad(images(device), (3, 3, 3, 3), "replicate").square().sum(),
    "grid_sampler": grid,
    "embedding_bag": largest_of_bags,
}
"""Operators of models that train on GPUs: torch may have a deterministic kernel by now, or must refuse them."""


def scattered(device: torch.device) -> Tensor:
    index = torch.randint(0, 50, (3000, 8), device=device)
    source = torch.randn(3000, 8, device=device, requires_grad=True)
    return torch.zeros(50, 8, device=device).scatter_add(0, index, source).square().sum()


def added_by_index(device: torch.device) -> Tensor:
    source = torch.randn(3000, 8, device=device, requires_grad=True)
    index = torch.randint(0, 50, (3000,), device=device)
    return torch.zeros(50, 8, device=device).index_add(0, index, source).square().sum()


def embedded(device: torch.device) -> Tensor:
    tokens = torch.randint(0, 50, (64, 64), device=device)
    return nn.Embedding(50, 32, device=device)(tokens).square().sum()


def attention(device: torch.device) -> Tensor:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    query, key, value = (torch.randn(4, 4, 256, 64, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True).float().square().sum()


def recurrent(device: torch.device) -> Tensor:
    out: Tensor = nn.LSTM(16, 32, 2, batch_first=True, device=device)(torch.randn(8, 20, 16, device=device))[0]
    return out.square().sum()


REPEATABLE: dict[str, Operator] = {
    "scatter_add": scattered,
    "index_add": added_by_index,
    "embedding": embedded,
    "attention": attention,
    "LSTM": recurrent,
    "convolution": lambda device: nn.Conv2d(8, 16, 3, device=device)(images(device)).square().sum(),
    "batch norm": lambda device: nn.BatchNorm2d(8, device=device)(images(device)).square().sum(),
    "bilinear interpolation": lambda device: F.interpolate(images(device), (50, 50), mode="bilinear").square().sum(),
    "nearest interpolation": lambda device: F.interpolate(images(device), (50, 50), mode="nearest").square().sum(),
    "max pool": lambda device: F.max_pool2d(images(device), 3, 2).square().sum(),
}


@pytest.fixture(autouse=True)
def deterministic(gpu: Gpu) -> Iterator[None]:
    fix_kernels(gpu.device, PromiseSettings())
    yield
    torch.use_deterministic_algorithms(False)


def run(operator: Operator, device: torch.device) -> list[Tensor]:
    """Return the value of an operator and every gradient of a leaf, from the same random numbers each time."""
    torch.manual_seed(0)
    value = operator(device)
    leaves: list[Tensor] = []
    pending, seen = [value.grad_fn], set[object]()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        pending += [each for each, _ in node.next_functions]
    return [value, *torch.autograd.grad(value, leaves)]


def is_repeatable(operator: Operator, device: torch.device) -> bool:
    first, *others = (run(operator, device) for _ in range(4))
    return all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("name", UNREPEATABLE)
def test_operator_is_refused_or_repeatable(gpu: Gpu, name: str) -> None:
    try:
        with name_unrepeatable_operator():
            assert is_repeatable(UNREPEATABLE[name], gpu.device)
    except LoopError as refused:
        assert not gpu.dry, "the CPU has a kernel"
        (problem,) = refused.problems
        assert problem.error.startswith(f"The operator {name}"), problem
        assert not problem.remedy.startswith("use another operator"), problem


@pytest.mark.parametrize("name", REPEATABLE)
def test_operator_is_repeatable(gpu: Gpu, name: str) -> None:
    assert is_repeatable(REPEATABLE[name], gpu.device)
