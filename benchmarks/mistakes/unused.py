"""Unused parameters that the optimizer changes nevertheless.

The figure is the distance that an unused layer moves in 3 steps on two processes with find_unused_parameters and AdamW
with weight decay. In plain torch its gradient is None, and AdamW does not change it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.mistakes.stage import ACCELERATE, DDP, FABRIC, TRAINER, Case, Place, gather

if TYPE_CHECKING:
    from unisono import Run

STEPS = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 1), nn.Linear(3, 1, bias=False)
        nn.init.ones_(self.unused.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.used(x)
        return out


def data() -> TensorDataset:
    return TensorDataset(torch.ones(8 * STEPS, 3))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)


def moved(model: Net) -> float:
    """Return the distance of this process's part of the weight from its initial value."""
    weight: Any = model.unused.weight.detach()
    mine: torch.Tensor = weight.to_local() if hasattr(weight, "to_local") else weight
    return float((mine - 1).abs().max()) if mine.numel() else 0.0


def ours(run: Run[Any], place: Place) -> float:
    model = run.place(Net)
    optimizer = adamw(model)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(data()):
        for (x,) in step:
            step.backward(model(x).sum(), weight=len(x))
        step.update(optimizer)
    return moved(model)


def accelerate(place: Place) -> float:
    from accelerate import Accelerator, DistributedDataParallelKwargs

    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
    plain = Net()
    loader = DataLoader(data(), batch_size=8 // place.size)
    model, optimizer, loader = accelerator.prepare(plain, adamw(plain), loader)
    for (x,) in loader:
        accelerator.backward(model(x).mean())
        optimizer.step()
        optimizer.zero_grad()
    return moved(plain)


def fabric(place: Place) -> float:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=place.size, strategy="ddp_find_unused_parameters_true")
    fabric.launch()
    plain = Net()
    model, optimizer = fabric.setup(plain, adamw(plain))
    for (x,) in fabric.setup_dataloaders(DataLoader(data(), batch_size=8 // place.size)):
        fabric.backward(model(x).mean())
        optimizer.step()
        optimizer.zero_grad()
    return moved(plain)


def trainer(place: Place) -> float:
    from benchmarks.mistakes.lightning import Module, fit

    class Wrapped(Module):
        def training_step(self, batch: Any) -> Any:
            return self.model(batch[0]).mean()

        def configure_optimizers(self) -> Any:
            return adamw(self)

    net = Wrapped(Net())
    loader = DataLoader(data(), batch_size=8 // place.size)
    fit(place, net, loader, max_steps=STEPS, strategy="ddp_find_unused_parameters_true")
    return moved(net.model)


def ddp(place: Place) -> float:
    """Return the largest distance over all options for unused parameters, and for fully_shard."""
    options: list[dict[str, Any]] = [{name: True} for name in ("find_unused_parameters", "static_graph")]
    options += [{**one, "gradient_as_bucket_view": True} for one in options]
    distances = []
    for option in [*options, None]:
        plain = Net()
        model: Any = fully_shard(plain) if option is None else nn.parallel.DistributedDataParallel(plain, **option)
        optimizer = adamw(plain)
        for _ in range(STEPS):
            model(torch.ones(8 // place.size, 3)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        distances.append(moved(plain))
        del model  # the reducer must not outlive the group
    return max(gather(max(distances)))


CASES = {
    "unused": Case(
        wrong="A layer that no sample used is moved by AdamW's decay all the same. How far, in 3 steps",
        right="0",
        is_right=lambda distance: distance == 0.0,
        describe=lambda distance: f"{distance:g}",
        peers={ACCELERATE: accelerate, TRAINER: trainer, FABRIC: fabric, DDP: ddp},
        ours=ours,
        settings={"steps": STEPS, "batch": 8},
    )
}
