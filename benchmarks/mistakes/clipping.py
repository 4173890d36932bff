"""Clipping by a norm of NaN, which silently sets all weights to NaN.

One of 8 samples on two processes has the square root of 0 in its loss, which is finite and has no finite gradient.
Gradients are clipped to 1. The figure is the number of weights, of 4, that are not finite after the step, or a refusal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.mistakes.stage import ACCELERATE, DDP, FABRIC, TRAINER, Case, Place

if TYPE_CHECKING:
    from unisono import Run


def data() -> TensorDataset:
    x = torch.ones(8, 4)
    x[0] = 0.0
    return TensorDataset(x)


def build() -> nn.Module:
    model = nn.Linear(4, 1, bias=False)
    nn.init.constant_(model.weight, 0.5)
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def distance(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the distance of each sample."""
    out: torch.Tensor = model(x).pow(2).sum(1).sqrt()
    return out


def lost(model: nn.Module) -> int:
    return sum(int((~torch.isfinite(p)).sum()) for p in model.parameters())


def ours(run: Run[Any], place: Place) -> str | int:
    from unisono import LoopError

    model = run.place(build)
    optimizer = sgd(model)
    run.track(model=model, optimizer=optimizer)
    try:
        for step in run.steps(data()):
            for (x,) in step:
                step.backward(distance(model, x).sum(), weight=len(x))
            step.update(optimizer)
    except LoopError as error:
        return f"refused, {lost(model)} lost" if "not finite" in str(error) else str(error)
    return lost(model)


def accelerate(place: Place) -> str | int:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    plain = build()
    model, optimizer, loader = accelerator.prepare(plain, sgd(plain), DataLoader(data(), batch_size=8 // place.size))
    for (x,) in loader:
        accelerator.backward(distance(model, x).mean())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return lost(plain)


def fabric(place: Place) -> str | int:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=place.size, strategy="ddp")
    fabric.launch()
    plain = build()
    model, optimizer = fabric.setup(plain, sgd(plain))
    for (x,) in fabric.setup_dataloaders(DataLoader(data(), batch_size=8 // place.size)):
        fabric.backward(distance(model, x).mean())
        try:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
        except RuntimeError as error:
            return f"refused, {lost(plain)} lost" if "non-finite" in str(error) else str(error)
        optimizer.step()
    return lost(plain)


def trainer(place: Place) -> str | int:
    from benchmarks.mistakes.lightning import Module, fit

    class Net(Module):
        def training_step(self, batch: Any) -> Any:
            return distance(self.model, batch[0]).mean()

    net = Net(build(), lr=0.1)
    fit(place, net, DataLoader(data(), batch_size=8 // place.size), max_steps=1, gradient_clip_val=1.0)
    return lost(net.model)


def ddp(place: Place) -> str | int:
    plain = build()
    model, optimizer = nn.parallel.DistributedDataParallel(plain), sgd(plain)
    sampler: Any = DistributedSampler(data(), place.size, place.rank, shuffle=False)
    for (x,) in DataLoader(data(), batch_size=8 // place.size, sampler=sampler):
        distance(model, x).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return lost(plain)


CASES = {
    "clipping": Case(
        wrong="A gradient that is not a number is clipped: weights of 4 that are lost after the step",
        right="refused, 0 lost",
        is_right=lambda found: found == "refused, 0 lost",
        describe=lambda found: found if isinstance(found, str) else f"{found} lost, in silence",
        peers={ACCELERATE: accelerate, TRAINER: trainer, FABRIC: fabric, DDP: ddp},
        ours=ours,
        settings={"steps": 1, "batch": 8, "clip": 1.0},
        note="By hand: clip_grad_norm_(..., error_if_nonfinite=True). Lightning: the same in "
        "configure_gradient_clipping.",
    )
}
