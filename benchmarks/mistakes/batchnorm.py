"""Running statistics of batch norm that differ by process, of which only those of rank 0 are saved.

Two processes train 50 steps on the same 8 samples, half of them 0 and half of them 2, in order. The figure is the
running mean that would be saved. The mean of all samples is 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from benchmarks.mistakes.stage import ACCELERATE, DDP, FABRIC, TRAINER, Case, Place

if TYPE_CHECKING:
    from unisono import Run

STEPS, BATCH = 50, 8


def build() -> nn.Module:
    return nn.BatchNorm1d(1)


def data() -> TensorDataset:
    return TensorDataset(torch.tensor([0.0] * 4 + [2.0] * 4)[:, None])


def loader(place: Place) -> DataLoader[Any]:
    """Give each process one half, as with sorted data, or with data of two sources."""
    half = BATCH // place.size
    return DataLoader(Subset(data(), range(place.rank * half, (place.rank + 1) * half)), batch_size=half)


def saved(model: nn.Module) -> float:
    """Return the running mean, which rank 0 would save."""
    return float(model.state_dict()["running_mean"].item())


def ours(run: Run[Any], place: Place) -> float:
    model = run.place(build)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(data(), shuffle=False):
        for (x,) in step:
            step.backward(model(x).sum(), weight=len(x))
        step.update(optimizer)
    return saved(model)


def accelerate(place: Place) -> float:
    from accelerate import Accelerator

    plain = build()
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(plain)
    for _ in range(STEPS):
        for (x,) in loader(place):
            accelerator.backward(model(x).sum())
    return saved(plain)


def fabric(place: Place) -> float:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=place.size, strategy="ddp")
    fabric.launch()
    plain = build()
    model = fabric.setup(plain)
    for _ in range(STEPS):
        for (x,) in loader(place):
            fabric.backward(model(x).sum())
    return saved(plain)


def trainer(place: Place) -> float:
    from benchmarks.mistakes.lightning import Module, fit

    class Net(Module):
        def training_step(self, batch: Any) -> Any:
            return self.model(batch[0]).sum()

    net = Net(build())
    fit(place, net, loader(place), max_steps=STEPS, max_epochs=-1, use_distributed_sampler=False)
    return saved(net.model)


def ddp(place: Place) -> float:
    plain = build()
    model = nn.parallel.DistributedDataParallel(plain)
    for _ in range(STEPS):
        for (x,) in loader(place):
            model(x).sum().backward()
    return saved(plain)


CASES = {
    "batch-norm": Case(
        wrong="Batch norm's running mean is that of the first process only. "
        "Its data is 0, the data of the other process is 2; 50 steps",
        right="1, to 0.15",
        is_right=lambda mean: abs(mean - 1.0) <= 0.15,
        describe=lambda mean: f"{mean:.3f}",
        peers={ACCELERATE: accelerate, TRAINER: trainer, FABRIC: fabric, DDP: ddp},
        ours=ours,
        settings={"steps": STEPS, "batch": BATCH, "virtual_ranks": 4},
        note="Unisono folds in the virtual ranks one after the other, so the later ones count a little more. "
        "Elsewhere, on GPUs: SyncBatchNorm.",
    )
}
