"""An incomplete accumulation window at the end of an epoch, divided by the size of a complete one.

Each of two processes has 6 micro-batches with a gradient of 1, and the window is 4 micro-batches. The figures are the
gradients that the optimizer uses in the epoch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.mistakes.stage import ACCELERATE, TRAINER, Case, Place

if TYPE_CHECKING:
    from unisono import Run

WINDOW, EACH = 4, 6


def data(size: int) -> TensorDataset:
    return TensorDataset(torch.ones(EACH * size, 1))


def build() -> nn.Module:
    return nn.Linear(1, 1, bias=False)


def gradient(model: Any) -> float:
    return float(model.weight.grad.item())


def ours(run: Run[Any], place: Place) -> list[float]:
    model = run.place(build)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    seen = []
    for step in run.steps(data(2)):  # the same data on any number of processes
        for (x,) in step:
            step.backward(model(x).sum(), weight=len(x))
        seen.append(gradient(model))
        step.update(optimizer)
    return seen


def accelerate(place: Place) -> list[float]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=WINDOW)
    plain = build()
    model, optimizer, loader = accelerator.prepare(
        plain, torch.optim.SGD(plain.parameters(), lr=0.1), DataLoader(data(place.size), batch_size=1)
    )
    seen = []
    for (x,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).mean())
            if accelerator.sync_gradients:
                seen.append(gradient(plain))
            optimizer.step()
            optimizer.zero_grad()
    return seen


def trainer(place: Place) -> list[float]:
    from benchmarks.mistakes.lightning import Module, fit

    class Net(Module):
        seen: tuple[float, ...] = ()

        def training_step(self, batch: Any) -> Any:
            return self.model(batch[0]).mean()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.seen = (*self.seen, gradient(self.model))

    net = Net(build())
    fit(place, net, DataLoader(data(place.size), batch_size=1), max_epochs=1, accumulate_grad_batches=WINDOW)
    return list(net.seen)


CASES = {
    "tail": Case(
        wrong="The end of an epoch fills half an accumulation window of 4. Gradients of the epoch's two steps",
        right="1, 1",
        is_right=lambda seen: seen == [1.0, 1.0],
        describe=lambda seen: ", ".join(f"{g:g}" for g in seen),
        peers={ACCELERATE: accelerate, TRAINER: trainer},
        ours=ours,
        settings={"epochs": 1, "batch": 2 * WINDOW, "virtual_ranks": 2, "micro_batch": 1},
        note="Elsewhere: make every epoch a multiple of the window. With Fabric, and by hand, the window is the "
        "script's.",
    )
}
