"""Micro-batches do not wait for the GPU: every wait that torch knows of raises an error in these tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from tests.gpu.conftest import Gpu
from unisono.config import LoaderSettings, PromiseSettings, Settings
from unisono.distributed.init import join_process_group as join
from unisono.environment import World
from unisono.testing import build_run, close_run


def train(folder: Path, settings: Settings, set_mode: Callable[[str], None]) -> None:
    """Train, and let a wait between the first and the last micro-batch of a step raise an error."""
    with join(World()) as group:
        run = build_run(settings, World(), group, folder)
        model = run.place(lambda: nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 8)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        run.track(model=model, optimizer=optimizer)
        data = TensorDataset(torch.randn(512, 64), torch.randint(0, 8, (512,)))
        for step in run.steps(data):
            for number, (x, y) in enumerate(step, 1):
                if step.number >= 3:  # the first steps allocate
                    set_mode("error")
                step.backward(F.cross_entropy(model(x), y, reduction="sum"), weight=len(y))
                if number == settings.virtual_ranks:  # then the loop waits for the losses
                    set_mode("default")
            step.update(optimizer)
        close_run(run)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("virtual_ranks", [1, 8])
def test_micro_batches_do_not_wait(gpu: Gpu, tmp_path: Path, virtual_ranks: int) -> None:
    settings = Settings(
        steps=10,
        batch=64,
        virtual_ranks=virtual_ranks,
        loader=LoaderSettings(workers=1),
        promise=PromiseSettings(check=False),
    )
    set_mode: Callable[[str], None] = (lambda mode: None) if gpu.dry else torch.cuda.set_sync_debug_mode
    try:
        train(tmp_path, settings, set_mode)
    finally:
        set_mode("default")
        torch.use_deterministic_algorithms(False)
