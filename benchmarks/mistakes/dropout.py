"""Equal dropout masks on all processes, because all have the same seed; and other masks after a resume.

Two processes apply one dropout layer to 64 ones. The first figure is the number of different masks. For the second one,
a run of 4 steps is saved and ended after 2: it is the number of later masks equal to those of an uninterrupted run.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.mistakes.stage import ACCELERATE, DDP, FABRIC, TRAINER, Case, Place, gather

if TYPE_CHECKING:
    from unisono import Run

STEPS, SAVED = 4, 2


class Masks:
    """The masks of this process. They are not in the module, whose attributes Unisono synchronizes."""

    def __init__(self) -> None:
        self.drawn: list[str] = []


class Net(nn.Module):
    """A dropout layer that records its masks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))
        self.dropout = nn.Dropout(0.5)
        self.masks = Masks()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.dropout(self.weight * x)
        self.masks.drawn.append("".join(str(int(value != 0)) for row in out.tolist() for value in row))
        return out


def data(size: int = 2) -> TensorDataset:
    """Return one sample per step and process."""
    return TensorDataset(torch.ones(STEPS * size, 64))


def loader(size: int) -> DataLoader[Any]:
    return DataLoader(data(size), batch_size=1)


def different(masks: list[str]) -> int:
    """Return the number of different masks in the first step."""
    return len(set(gather(masks[0])))


def again(place: Place, masks: list[str]) -> int:
    """Return the number of steps after the resume with the masks of the uninterrupted run.

    The first launch runs all steps and saves the state after two; the second one resumes from it.
    """
    everywhere = [list(step) for step in zip(*gather(masks), strict=True)]
    before = place.folder / "masks.json"
    if place.launch == 0:
        if place.rank == 0:
            before.write_text(json.dumps(everywhere), encoding="utf-8")
        return -1
    wanted = json.loads(before.read_text(encoding="utf-8"))[SAVED:]
    return sum(a == b for a, b in zip(wanted, everywhere, strict=True))


def train(run: Run[Any]) -> list[str]:
    model = run.place(Net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(data()):
        for (x,) in step:
            step.backward(model(x).sum(), weight=len(x))
        step.update(optimizer)
    return model.masks.drawn


def ours(run: Run[Any], place: Place) -> int:
    return different(train(run))


def ours_resumed(run: Run[Any], place: Place) -> int:
    """Resume from the checkpoint after two steps, as a run that is killed in the third."""
    masks = train(run)
    if place.launch == 0 and place.rank == 0:
        from shutil import rmtree

        for newer in run.dir.glob("checkpoints/*"):
            if str(STEPS) in newer.name:
                rmtree(newer)
    return again(place, masks)


def accelerate(place: Place) -> int:
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    set_seed(0)
    accelerator = Accelerator(cpu=True)
    plain = Net()
    model, batches = accelerator.prepare(plain, loader(place.size))
    for (x,) in batches:
        accelerator.backward(model(x).mean())
    return different(plain.masks.drawn)


def accelerate_resumed(place: Place) -> int:
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    set_seed(0)
    accelerator = Accelerator(cpu=True)
    plain, state = Net(), str(place.folder / "state")
    model, batches = accelerator.prepare(plain, loader(place.size))
    if place.launch == 1:
        accelerator.load_state(state)
        batches = accelerator.skip_first_batches(batches, SAVED)
    for i, (x,) in enumerate(batches):
        accelerator.backward(model(x).mean())
        if place.launch == 0 and i + 1 == SAVED:
            accelerator.save_state(state)
    return again(place, plain.masks.drawn)


def fabric(place: Place) -> int:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=place.size, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    plain = Net()
    model = fabric.setup(plain)
    for (x,) in fabric.setup_dataloaders(loader(place.size)):
        fabric.backward(model(x).mean())
    return different(plain.masks.drawn)


def trainer(place: Place, resumed: bool = False) -> int:
    from lightning import seed_everything
    from lightning.pytorch.callbacks import ModelCheckpoint

    from benchmarks.mistakes.lightning import Module, build_trainer, fit

    class Wrapped(Module):
        def training_step(self, batch: Any) -> Any:
            return self.model(batch[0]).mean()

    seed_everything(0, verbose=False)
    net, folder = Wrapped(Net()), place.folder / "states"
    if not resumed:
        fit(place, net, loader(place.size), max_epochs=1)
        return different(net.model.masks.drawn)
    keep = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=SAVED, save_top_k=-1)
    state = folder / f"step={SAVED}.ckpt" if place.launch == 1 else None
    whole = build_trainer(place, max_steps=STEPS, enable_checkpointing=True, callbacks=[keep])
    whole.fit(net, loader(place.size), ckpt_path=state)
    return again(place, net.model.masks.drawn)


def ddp(place: Place) -> int:
    torch.manual_seed(0)
    plain = Net()
    nn.parallel.DistributedDataParallel(plain)(torch.ones(1, 64)).mean().backward()
    return different(plain.masks.drawn)


CASES = {
    "dropout": Case(
        wrong="All processes have the same seed, so they draw the same dropout masks. Different masks on two processes",
        right="2",
        is_right=lambda masks: masks == 2,
        describe=str,
        peers={ACCELERATE: accelerate, TRAINER: trainer, FABRIC: fabric, DDP: ddp},
        ours=ours,
        settings={"steps": STEPS, "batch": 2, "virtual_ranks": 2},
        note="Accelerate: set_seed(seed, device_specific=True). By hand: torch.manual_seed(seed + rank), after "
        "the model is built.",
    ),
    "dropout-resumed": Case(
        wrong="A resume draws other dropout masks. "
        "Of two steps after a resume, those with the masks of an uninterrupted run",
        right="2",
        is_right=lambda steps: steps == 2,
        describe=str,
        peers={ACCELERATE: accelerate_resumed, TRAINER: lambda place: trainer(place, resumed=True)},
        ours=ours_resumed,
        settings={"steps": STEPS, "batch": 2, "virtual_ranks": 2, "checkpoint.every": SAVED},
        launches=2,
        note="Lightning: save and restore the state of torch's generator in a callback.",
    ),
}
