"""Linear layers in float8 on a GPU: the loss of float32 up to rounding, and the same bits each time."""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch
from torch import nn

from tests.gpu.conftest import Gpu
from unisono.parallel.speed.float8_linear import lacks_float8, use_float8


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.usefixtures("only_cuda")
@pytest.mark.filterwarnings("ignore:invalid escape sequence:SyntaxWarning")  # torchao, compiled for the first time
@pytest.mark.parametrize("kind", ["tensorwise", "rowwise"])
def test_float8(gpu: Gpu, kind: str) -> None:
    if why := lacks_float8(kind, gpu.device):
        pytest.skip(why)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 16)).to(gpu.device)
    x = torch.randn(32, 64, device=gpu.device)
    low, count = use_float8(copy.deepcopy(model), kind, gpu.device)
    assert count == 2
    found = []
    for _ in range(2):
        low.zero_grad()
        loss = low(x).square().sum()
        loss.backward()
        found.append((loss.detach(), *(p.grad.clone() for p in low.parameters() if p.grad is not None)))
    assert all(map(torch.equal, *found))
    whole = model(x).square().sum().detach()
    assert abs(float(found[0][0] / whole) - 1) < 0.1
