"""Evaluation rows that count twice, so that all processes have the same number.

101 rows, the numbers 0 to 100, are evaluated in batches of 4 on 2, 3 and 4 processes. The figures are the number of
rows and their mean, for a data set with a length and for a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from benchmarks.mistakes.stage import ACCELERATE, DDP, FABRIC, TRAINER, Case, Place, gather

if TYPE_CHECKING:
    from unisono import Run

ROWS, BATCH = 101, 4


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor([float(i)])


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([float(i)]) for i in range(ROWS))


Build = Callable[[], Any]


def figure(values: list[float]) -> dict[str, float]:
    """Return count and mean of the rows of all processes."""
    return {"rows": len(values), "mean": sum(values) / len(values)}


def mine(seen: list[float]) -> dict[str, float]:
    return figure([value for each in gather(seen) for value in each])


def ours(build: Build, run: Run[Any]) -> dict[str, float]:
    model = run.place(nn.Identity)
    seen: list[float] = []

    def value(output: torch.Tensor, *batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        seen.extend(output.flatten().tolist())
        return output.sum(), len(output)

    found = run.evaluate(model, build(), value)
    assert len(found) == 1
    return {"rows": mine(seen)["rows"], "mean": found["value"]}


def accelerate(build: Build) -> dict[str, float]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    seen: list[float] = []
    for x in accelerator.prepare(DataLoader(build(), batch_size=BATCH)):
        seen += accelerator.gather_for_metrics(x).flatten().tolist()
    return figure(seen)


def accelerate_stream(place: Place) -> dict[str, float]:
    """Let each process read its part of the stream. By default rank 0 reads it and sends the rows."""
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    seen: list[float] = []
    for x in accelerator.prepare(DataLoader(Stream(), batch_size=BATCH)):
        seen += accelerator.gather_for_metrics(x).flatten().tolist()
    return figure(seen)


def fabric(build: Build, place: Place) -> dict[str, float]:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=place.size, strategy="ddp")
    fabric.launch()
    seen: list[float] = []
    for x in fabric.setup_dataloaders(DataLoader(build(), batch_size=BATCH)):
        seen += x.flatten().tolist()
    return mine(seen)


def trainer(build: Build, place: Place) -> dict[str, float]:
    from benchmarks.mistakes.lightning import Module, build_trainer

    class Net(Module):
        def validation_step(self, batch: Any) -> None:
            self.log("rows", float(len(batch)), sync_dist=True, on_epoch=True, reduce_fx="sum")
            self.log("mean", batch.mean(), sync_dist=True, on_epoch=True, batch_size=len(batch))

    found = build_trainer(place).validate(Net(nn.Linear(1, 1)), DataLoader(build(), batch_size=BATCH), verbose=False)
    return {name: float(value) for name, value in found[0].items()}


def ddp(place: Place) -> dict[str, float]:
    rows = Rows()
    sampler: Any = DistributedSampler(rows, place.size, place.rank, shuffle=False)
    return mine([v for x in DataLoader(rows, batch_size=BATCH, sampler=sampler) for v in x.flatten().tolist()])


def ddp_stream(place: Place) -> dict[str, float]:
    return mine([v for x in DataLoader(Stream(), batch_size=BATCH) for v in x.flatten().tolist()])


def told(found: dict[str, float]) -> str:
    return f"{found['rows']:g} rows, mean {found['mean']:.2f}"


def is_right(found: dict[str, float]) -> bool:
    return found["rows"] == ROWS and abs(found["mean"] - 50.0) < 1e-9


CASES = {
    "evaluation": Case(
        wrong="Evaluation counts some rows twice, so that each process has the same number: "
        "101 rows, the numbers 0 to 100",
        right="101 rows, mean 50.00",
        is_right=is_right,
        describe=told,
        peers={
            ACCELERATE: lambda place: accelerate(Rows),
            TRAINER: lambda place: trainer(Rows, place),
            FABRIC: lambda place: fabric(Rows, place),
            DDP: ddp,
        },
        ours=lambda run, place: ours(Rows, run),
        settings={"steps": 1, "batch": 32},
        sizes=(2, 3, 4),
        note="Accelerate: gather rows with gather_for_metrics, as here, never a batch's mean. Lightning's Trainer "
        "warns of it. Elsewhere: evaluate on one process, or mask the rows that were added.",
    ),
    "stream": Case(
        wrong="The same rows as a stream without a length",
        right="101 rows, mean 50.00",
        is_right=is_right,
        describe=told,
        peers={
            ACCELERATE: lambda place: accelerate(Stream),
            f"{ACCELERATE}, dispatch_batches=False": accelerate_stream,
            TRAINER: lambda place: trainer(Stream, place),
            FABRIC: lambda place: fabric(Stream, place),
            DDP: ddp_stream,
        },
        ours=lambda run, place: ours(Stream, run),
        settings={"steps": 1, "batch": 32},
        sizes=(2, 3, 4),
        note="Lightning and by hand: the data set itself must choose its rows by rank.",
    ),
}
