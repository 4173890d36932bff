"""With one virtual rank on a GPU, the loop by hand gives the same bits: same precision, same kernels, same compiler."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from tests.gpu.conftest import Gpu
from unisono.config import PromiseSettings, Settings
from unisono.data.rng import seed_everything
from unisono.distributed.init import join_process_group as join
from unisono.environment import World
from unisono.plan.batch_order import BatchOrder
from unisono.plan.rng_keys import INIT, STEP, mix
from unisono.testing import build_run, close_run
from unisono.train.guarantees.deterministic_kernels import fix_kernels

STEPS, BATCH, COUNT = 12, 16, 96


class Net(nn.Module):
    """Convolutions with batch norm, attention and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AvgPool2d(4), nn.Flatten(2)
        )
        self.attention = nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.attention(self.convolutions(x).transpose(1, 2)).mean(1))
        return out


@pytest.fixture(autouse=True)
def torchs_configuration() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


def data() -> TensorDataset:
    numbers = torch.Generator().manual_seed(3)
    images = torch.randn(COUNT, 3, 16, 16, generator=numbers)
    return TensorDataset(images, torch.randint(0, 10, (COUNT,), generator=numbers))


def ours(gpu: Gpu, folder: Path, precision: Any) -> dict[str, torch.Tensor]:
    with join(World()) as group:
        settings = Settings(steps=STEPS, batch=BATCH, virtual_ranks=1, seed=1, precision=precision)
        run = build_run(settings, World(), group, folder)
        model = run.place(Net)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(data()):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y, reduction="sum"), weight=len(y))
            step.update(optimizer)
        close_run(run)
    return {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}


def by_hand(gpu: Gpu, precision: str) -> dict[str, torch.Tensor]:
    fix_kernels(gpu.device, PromiseSettings())
    accelerator = gpu.device if gpu.device.type == "cuda" else None
    seed_everything(mix(1, INIT, 0), accelerator)
    model = Net().to(gpu.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    order = BatchOrder(length=COUNT, batch=BATCH, virtual_ranks=1, seed=1)
    inputs, targets = data().tensors
    seed_everything(mix(mix(1, STEP), 0), accelerator)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    for step in range(STEPS):
        ((_, samples),) = order.places(step, (0, 1))
        x, y = (of[list(samples)].to(gpu.device) for of in (inputs, targets))
        with torch.autocast(gpu.device.type, dtype, enabled=precision == "bf16"):
            out = model(x)
        F.cross_entropy(out.float(), y, reduction="sum").backward()
        weight = torch.tensor(len(y), dtype=torch.float64, device=gpu.device)  # a number would be inverted first
        for p in model.parameters():
            if p.grad is not None:
                p.grad /= weight
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_has_the_same_bits(gpu: Gpu, tmp_path: Path, precision: str) -> None:
    mine, theirs = ours(gpu, tmp_path, precision), by_hand(gpu, precision)
    differ = [name for name, tensor in theirs.items() if not torch.equal(mine[name], tensor)]
    assert not differ, differ
