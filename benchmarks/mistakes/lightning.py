"""Shared code of the cases of Lightning's Trainer. It can be imported only where Lightning is installed."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from torch import nn

from benchmarks.mistakes.stage import Place


class Module(lightning.LightningModule):
    """A LightningModule around `model`, with SGD."""

    def __init__(self, model: nn.Module, lr: float = 0.0) -> None:
        super().__init__()
        self.model: Any = model
        self.lr = lr

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def build_trainer(place: Place, **options: Any) -> Any:
    """Return a Trainer on all processes, without output, and without files unless the case needs them."""
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": place.folder,
        "strategy": "ddp",
        "num_sanity_val_steps": 0,
    }
    return lightning.Trainer(accelerator="cpu", devices=place.size, **{**quiet, **options})


def fit(place: Place, net: Any, loader: Any, **options: Any) -> Any:
    trainer = build_trainer(place, **options)
    trainer.fit(net, loader)
    return trainer
