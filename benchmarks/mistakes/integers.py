"""A mean over an epoch whose weights are averaged as integers, and so rounded down.

The figure is the mean of 13 rows, the numbers 0 to 12, of which the first process has 5 and the second one 8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.mistakes.stage import ACCELERATE, TRAINER, Case, Place

if TYPE_CHECKING:
    from unisono import Run

PARTS = ((0, 5), (5, 13))


def data() -> TensorDataset:
    return TensorDataset(torch.arange(13.0))


def ours(run: Run[Any], place: Place) -> float:
    """Let the library divide the rows. The division must not affect the result."""

    def value(output: torch.Tensor, *batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        return output.sum(), len(output)

    return run.evaluate(run.place(nn.Identity), data(), value)["value"]


def accelerate(place: Place) -> float:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    rows: list[float] = []
    for (x,) in accelerator.prepare(DataLoader(data(), batch_size=8)):
        rows += accelerator.gather_for_metrics(x).tolist()
    return sum(rows) / len(rows)


def trainer(place: Place) -> float:
    from benchmarks.mistakes.lightning import Module, build_trainer

    class Net(Module):
        def validation_step(self, batch: Any) -> None:
            self.log("mean", batch[0].mean(), sync_dist=True, on_epoch=True, batch_size=len(batch[0]))

    start, stop = PARTS[place.rank]
    loader = DataLoader(torch.utils.data.Subset(data(), range(start, stop)), batch_size=8)
    found = build_trainer(place, use_distributed_sampler=False).validate(Net(nn.Linear(1, 1)), loader, verbose=False)
    return float(found[0]["mean"])


CASES = {
    "integers": Case(
        wrong="The weights of an epoch's mean are rounded down. "
        "The mean of 0 to 12, 5 numbers on one process and 8 on the other",
        right="6",
        is_right=lambda mean: abs(mean - 6.0) < 1e-9,
        describe=lambda mean: f"{mean:g}",
        peers={ACCELERATE: accelerate, TRAINER: trainer},
        ours=ours,
        settings={"steps": 1, "batch": 8},
        note="Lightning: log sums and counts yourself, or use torchmetrics.",
    )
}
