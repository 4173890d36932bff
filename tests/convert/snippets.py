"""A small script with changes, and what the converter makes of it."""

from __future__ import annotations

import ast
import textwrap
from typing import Any

import pytest

from unisono.errors import SettingsError

HEAD = """
import os
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
"""
MAIN = """
def main():
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    loader = DataLoader(data, batch_size=16, shuffle=True)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
"""
SCRIPT = HEAD + MAIN


def script(*changes: tuple[str, str], head: str = "") -> str:
    """Return the script with these replacements, each of which must apply."""
    text = SCRIPT
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return head + text


def converted(source: str, processes: int | None = None) -> Any:
    from unisono.convert.script_conversion import convert  # here, because it loads libcst

    done = convert(textwrap.dedent(source), "train.py", "train_unisono.py", processes)
    ast.parse(done.code)
    return done


def lines(source: str, processes: int | None = None) -> list[str]:
    """Return the lines of the converted script, without blanks around them."""
    return [line.strip() for line in converted(source, processes).code.splitlines() if line.strip()]


def refused(source: str) -> str:
    with pytest.raises(SettingsError) as caught:
        converted(source)
    return str(caught.value)
