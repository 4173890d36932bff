"""Weights in channels_last: the kernels, and so the bits, of one process, also where they are divided row by row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks.loops import SETTINGS, Numbers, attempt, train
from unisono.settings import ParallelSettings
from unisono.testing import run_ranks
from unisono.train.run import Run


class Pictures(nn.Module):
    """Pictures of three numbers, and convolutions over them: some are layers themselves, one is in none."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.rows = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(2))
        self.last = nn.Linear(16, 2)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        assert not self.first.weight.is_contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.linspace(-1, 1, 25).view(1, 1, 5, 5)
        h = (x[:, :, None, None] * places).sin()  # row after row: the weights decide how it goes on
        for layer in (self.first, *self.rows):
            h = layer(h).relu()
        out: torch.Tensor = self.last(h.mean((2, 3)))
        return out


def pictures(run: Run[Any]) -> Any:
    return train(run, build=Pictures, data=Numbers(24))


class Transposed(nn.Module):
    """A weight that is stored transposed, and used outside of its module's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ModuleList(nn.Linear(3, 32) for _ in range(1))
        self.out = nn.Linear(32, 16)
        self.out.weight = nn.Parameter(torch.randn(32, 16).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.rows[0](x), self.out.weight, self.out.bias)


def transposed(run: Run[Any]) -> Any:
    return train(run, build=Transposed, data=Numbers(24))


@pytest.mark.parametrize("gather", ["layer", "step"])
@pytest.mark.parametrize("loop", [pictures, transposed])
def test_shards_compute_in_the_order_of_one_process(tmp_path: Path, loop: Any, gather: Any) -> None:
    (alone,) = run_ranks(attempt, 1, tmp_path / "one", loop)
    config = replace(SETTINGS, parallel=ParallelSettings(shard=2, gather=gather))
    shards = run_ranks(attempt, 2, tmp_path / "two", loop, config)
    assert isinstance(alone, list), alone
    assert shards == [alone] * 2
