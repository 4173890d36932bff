"""A mean of means: micro-batches with few tokens count as much as those with many.

Two processes have two micro-batches each, of 2, 30, 50 and 6 tokens. The figure is the relative L2 error of the
gradient that the optimizer would use; the reference is the mean over all 88 tokens in double precision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.mistakes.stage import ACCELERATE, DDP, FABRIC, TRAINER, Case, Place

if TYPE_CHECKING:
    from unisono import Run

COUNTS = (2, 30, 50, 6)
WIDTH, CLASSES = 16, 11


class Sequences(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Four sequences of tokens: features and learnable classes."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(0)
        teacher = torch.randn(WIDTH, CLASSES, generator=g)
        features = [torch.randn(n, WIDTH, generator=g) for n in COUNTS]
        self.rows = [(x, (x @ teacher).argmax(1)) for x in features]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rows[i]


def build() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(WIDTH, CLASSES)


def loader() -> DataLoader[Any]:
    """Return a loader with one sequence per micro-batch."""
    return DataLoader(Sequences(), batch_size=1)


def mean(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the loss as models do: a mean over the tokens of a micro-batch."""
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def error(model: nn.Module) -> float:
    """Return the relative error of the model's gradient."""
    exact = nn.Linear(WIDTH, CLASSES).double()
    exact.load_state_dict(build().state_dict())
    x, y = (torch.cat(column) for column in zip(*Sequences().rows, strict=True))
    F.cross_entropy(exact(x.double()), y).backward()
    right = torch.cat([p.grad.flatten() for p in exact.parameters() if p.grad is not None])
    found = torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])
    return float((found - right).norm() / right.norm())


def ours(run: Run[Any], place: Place) -> float:
    model = run.place(build)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    found = 0.0
    for step in run.steps(Sequences()):
        for x, y in step:
            step.backward(mean(model, x, y), weight=y.numel(), mean=True)
        found = error(model)
        step.update(optimizer)
    return found


def accelerate(place: Place) -> float:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, batches = accelerator.prepare(build(), loader())
    for x, y in batches:
        with accelerator.accumulate(model):
            accelerator.backward(mean(model, x, y))
    assert accelerator.sync_gradients
    return error(accelerator.unwrap_model(model))


def fabric(place: Place) -> float:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=place.size, strategy="ddp")
    fabric.launch()
    plain = build()
    model = fabric.setup(plain)
    for i, (x, y) in enumerate(fabric.setup_dataloaders(loader())):
        with fabric.no_backward_sync(model, enabled=i == 0):
            fabric.backward(mean(model, x, y) / 2)
    return error(plain)


def trainer(place: Place) -> float:
    from benchmarks.mistakes.lightning import Module, fit

    class Net(Module):
        def training_step(self, batch: Any) -> Any:
            return mean(self.model, *batch)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.error = error(self.model)

    net = Net(build())
    fit(place, net, loader(), max_steps=1, accumulate_grad_batches=2)
    return float(net.error)


def ddp(place: Place) -> float:
    plain = build()
    model = nn.parallel.DistributedDataParallel(plain)
    sampler: Any = torch.utils.data.DistributedSampler(Sequences(), place.size, place.rank, shuffle=False)
    for i, (x, y) in enumerate(DataLoader(Sequences(), batch_size=1, sampler=sampler)):
        if i == 0:
            with model.no_sync():
                (mean(model, x, y) / 2).backward()
        else:
            (mean(model, x, y) / 2).backward()
    return error(plain)


CASES = {
    "tokens": Case(
        wrong="Few tokens weigh as much as many: micro-batches of 2, 30, 50 and 6 tokens, two on each process. "
        "Relative error of the gradient",
        right="0",
        is_right=lambda error: error <= 1e-6,
        describe=lambda error: f"{error:.3f}" if error > 1e-3 else f"{error:.0e}",
        peers={ACCELERATE: accelerate, TRAINER: trainer, FABRIC: fabric, DDP: ddp},
        ours=ours,
        settings={"steps": 1, "batch": 4, "virtual_ranks": 2, "micro_batch": 1},
        note="Elsewhere: count the tokens of the whole window on all processes first, and scale each loss by hand.",
    )
}
