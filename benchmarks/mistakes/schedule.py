"""A schedule that is stepped once per process, so that the learning rate falls too fast.

The figure is the learning rate on two processes after 50 steps of a linear decay over 100 steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.mistakes.stage import ACCELERATE, FABRIC, TRAINER, Case, Place

if TYPE_CHECKING:
    from unisono import Run

STEPS, LENGTH = 50, 100


def data() -> TensorDataset:
    return TensorDataset(torch.ones(8 * STEPS, 3), torch.ones(8 * STEPS, 1))


def parts() -> tuple[nn.Module, torch.optim.Optimizer, LambdaLR]:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, optimizer, decay(optimizer)


def decay(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: max(0.0, 1 - step / LENGTH))


def ours(run: Run[Any], place: Place) -> float:
    model = run.place(lambda: nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = decay(optimizer)
    run.track(model=model, optimizer=optimizer, schedule=schedule)
    for step in run.steps(data()):
        for x, y in step:
            step.backward(0 * F.mse_loss(model(x), y, reduction="sum"), weight=len(x))
        step.update(optimizer, schedule)
    return float(schedule.get_last_lr()[0])


def accelerate(place: Place) -> float:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = DataLoader(data(), batch_size=8 // place.size)
    model, optimizer, schedule = parts()
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    steps = 0
    for x, y in loader:
        accelerator.backward(0 * F.mse_loss(model(x), y))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        steps += 1
    assert steps == STEPS, steps
    return float(schedule.get_last_lr()[0])


def fabric(place: Place) -> float:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=place.size, strategy="ddp")
    fabric.launch()
    model, optimizer, schedule = parts()
    model, optimizer = fabric.setup(model, optimizer)
    for x, y in fabric.setup_dataloaders(DataLoader(data(), batch_size=8 // place.size)):
        fabric.backward(0 * F.mse_loss(model(x), y))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return float(schedule.get_last_lr()[0])


def trainer(place: Place) -> float:
    from benchmarks.mistakes.lightning import Module, fit

    class Net(Module):
        def training_step(self, batch: Any) -> Any:
            return 0 * F.mse_loss(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            self.optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            self.schedule = decay(self.optimizer)
            return {"optimizer": self.optimizer, "lr_scheduler": {"scheduler": self.schedule, "interval": "step"}}

    net = Net(nn.Linear(3, 1))
    fit(place, net, DataLoader(data(), batch_size=8 // place.size), max_steps=STEPS)
    return float(net.schedule.get_last_lr()[0])


CASES = {
    "schedule": Case(
        wrong="A schedule is stepped once for each process. Learning rate after 50 of 100 steps of a linear decay",
        right="0.5",
        is_right=lambda lr: abs(lr - 0.5) < 1e-9,
        describe=lambda lr: f"{lr:g}",
        peers={ACCELERATE: accelerate, TRAINER: trainer, FABRIC: fabric},
        ours=ours,
        settings={"steps": STEPS, "batch": 8},
        note="Accelerate: multiply the schedule's length by the number of processes, or do not prepare it.",
    )
}
