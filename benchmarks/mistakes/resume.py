"""A resume in the middle of an epoch that uses samples twice, or never.

Two processes train two epochs of 64 samples with 8 per step. The run is saved in the middle of the second epoch, and
new processes resume it. The figures count samples that the second epoch uses twice or never.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.mistakes.stage import ACCELERATE, TRAINER, Case, Place, gather

if TYPE_CHECKING:
    from unisono import Run

SAMPLES, BATCH = 64, 8
EPOCH, SAVED = 8, 12  # steps


def data() -> TensorDataset:
    return TensorDataset(torch.arange(float(SAMPLES)))


def build() -> nn.Module:
    return nn.Linear(1, 1)


def loader(place: Place) -> DataLoader[Any]:
    return DataLoader(data(), batch_size=BATCH // place.size, shuffle=True)


def figure(place: Place, first: int, seen: list[list[float]]) -> dict[str, int]:
    """Count samples of both launches in the second epoch; `seen` starts with step `first`.

    Of the first launch, only the steps before the checkpoint count, since a killed run may have done more.
    """
    now = [v for each in gather(seen) for n, step in enumerate(each, first) if n >= EPOCH for v in step]
    before = place.folder / "seen.json"
    if place.launch == 0:
        if place.rank == 0:
            before.write_text(json.dumps(now), encoding="utf-8")
        return {}
    used = [*json.loads(before.read_text(encoding="utf-8")), *now]
    return {"used": len(used), "twice": len(used) - len(set(used)), "never": SAMPLES - len(set(used))}


def ours(run: Run[Any], place: Place) -> dict[str, int]:
    model = run.place(build)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    run.track(model=model, optimizer=optimizer)
    seen: list[list[float]] = []
    first = run.context.progress.steps_done
    for step in run.steps(data()):
        seen.append([])
        for (x,) in step:
            seen[-1] += x.tolist()
            step.backward(model(x[:, None]).sum(), weight=len(x))
        step.update(optimizer)
        if place.launch == 0 and step.number + 1 == SAVED:
            run.stop()
    return figure(place, first, seen)


def accelerate(place: Place, seedable: bool = False) -> dict[str, int]:
    """Follow the guide to checkpointing: load_state, then skip_first_batches in the interrupted epoch.

    A seedable sampler needs set_epoch; without, it repeats the first epoch.
    """
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.utils import set_seed

    set_seed(0)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable))
    state = str(place.folder / "state")
    model, batches = accelerator.prepare(build(), loader(place))
    if place.launch == 1:
        accelerator.load_state(state)
    seen: list[list[float]] = []
    for epoch in range(place.launch, 2):
        active = accelerator.skip_first_batches(batches, SAVED - EPOCH) if place.launch == 1 else batches
        if seedable:
            active.set_epoch(epoch)
        for (x,) in active:
            seen.append(x.tolist())
            accelerator.backward(model(x[:, None]).mean())
            if place.launch == 0 and len(seen) == SAVED:
                accelerator.save_state(state)
                break
    return figure(place, SAVED * place.launch, seen)


def trainer(place: Place) -> dict[str, int]:
    from lightning import seed_everything
    from lightning.pytorch.callbacks import ModelCheckpoint

    from benchmarks.mistakes.lightning import Module, build_trainer

    seen: list[list[float]] = []

    class Net(Module):
        def training_step(self, batch: Any) -> Any:
            seen.append(batch[0].tolist())
            return self.model(batch[0][:, None]).mean()

    seed_everything(0, verbose=False)
    net, folder = Net(build()), place.folder / "states"
    state = folder / f"step={SAVED}.ckpt" if place.launch == 1 else None
    keep = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=SAVED, save_top_k=-1)
    whole = build_trainer(place, max_epochs=2, enable_checkpointing=True, callbacks=[keep])
    whole.fit(net, loader(place), ckpt_path=state)
    return figure(place, SAVED * place.launch, seen if place.launch else seen[:SAVED])


CASES = {
    "resume": Case(
        wrong="A resume in the middle of the second epoch: of its 64 samples, those used twice, and never",
        right="0 twice, 0 never",
        is_right=lambda found: found == {"used": SAMPLES, "twice": 0, "never": 0},
        describe=lambda found: f"{found['twice']} twice, {found['never']} never",
        peers={
            ACCELERATE: accelerate,
            f"{ACCELERATE}, use_seedable_sampler=True and set_epoch": lambda place: accelerate(place, seedable=True),
            TRAINER: trainer,
        },
        ours=ours,
        settings={"epochs": 2, "batch": BATCH},
        launches=2,
        note="Lightning warns of it, and asks for a loader that keeps its own state. With Fabric, and by "
        "hand, this is left to the script.",
    )
}
