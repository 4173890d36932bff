"""An order of samples that repeats in each epoch, because the script does not call set_epoch.

The figure is the number of different orders in three epochs over 16 samples on two processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.mistakes.stage import ACCELERATE, DDP, FABRIC, TRAINER, Case, Place, gather

if TYPE_CHECKING:
    from unisono import Run

EPOCHS, SAMPLES = 3, 16


def data() -> TensorDataset:
    return TensorDataset(torch.arange(float(SAMPLES)))


def loader(place: Place) -> DataLoader[Any]:
    return DataLoader(data(), batch_size=4 // place.size, shuffle=True)


def figure(seen: list[float]) -> int:
    """Return the number of different orders of this process's samples."""
    size = len(seen) // EPOCHS
    everywhere = gather([seen[i * size : (i + 1) * size] for i in range(EPOCHS)])
    return len({str([each[i] for each in everywhere]) for i in range(EPOCHS)})


def ours(run: Run[Any], place: Place) -> int:
    model = run.place(lambda: nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    run.track(model=model, optimizer=optimizer)
    seen: list[float] = []
    for step in run.steps(data()):
        for (x,) in step:
            seen += x.tolist()
            step.backward(model(x[:, None]).sum(), weight=len(x))
        step.update(optimizer)
    return figure(seen)


def accelerate(place: Place) -> int:
    from accelerate import Accelerator

    batches = Accelerator(cpu=True).prepare(loader(place))
    return figure([value for _ in range(EPOCHS) for (x,) in batches for value in x.tolist()])


def fabric(place: Place) -> int:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=place.size, strategy="ddp")
    fabric.launch()
    batches = fabric.setup_dataloaders(loader(place))
    return figure([value for _ in range(EPOCHS) for (x,) in batches for value in x.tolist()])


def trainer(place: Place) -> int:
    from benchmarks.mistakes.lightning import Module, fit

    class Net(Module):
        seen: tuple[float, ...] = ()

        def training_step(self, batch: Any) -> Any:
            self.seen = (*self.seen, *batch[0].tolist())
            return self.model(batch[0][:, None]).mean()

    net = Net(nn.Linear(1, 1))
    fit(place, net, loader(place), max_epochs=EPOCHS)
    return figure(list(net.seen))


def ddp(place: Place) -> int:
    sampler: Any = DistributedSampler(data(), place.size, place.rank)
    batches = DataLoader(data(), batch_size=4 // place.size, sampler=sampler)
    return figure([value for _ in range(EPOCHS) for (x,) in batches for value in x.tolist()])


CASES = {
    "shuffle": Case(
        wrong="Every epoch has the same order, because the script does not call set_epoch. "
        "Different orders in 3 epochs",
        right="3",
        is_right=lambda orders: orders == EPOCHS,
        describe=str,
        peers={ACCELERATE: accelerate, TRAINER: trainer, FABRIC: fabric, DDP: ddp},
        ours=ours,
        settings={"epochs": EPOCHS, "batch": 4, "virtual_ranks": 4},
        note="By hand: sampler.set_epoch(epoch).",
    )
}
