"""Train the same model with several libraries, as their documentation advises: one generator each.

Each one reads the data in its order, takes `accumulate` micro-batches per step on each process, and updates with AdamW
and the gradient of the mean loss. So all compute the same weights up to rounding, which laps.py checks. A library is
imported in its own function, so that a process that measures it loads no other.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

Loss = Callable[..., torch.Tensor]
"""loss(output, target, reduction="mean")"""


@dataclass(frozen=True)
class Setup:
    """Model, data and batch size, the same for all arms.

    Args:
        rank: Rank of this process, of `size`.
        micro: Samples in a micro-batch.
        accumulate: Micro-batches of a process in a step.
    """

    model: nn.Module
    data: Dataset[Any]
    loss: Loss
    rank: int
    size: int
    micro: int
    accumulate: int
    folder: Path

    def start(self) -> tuple[Any, Any]:
        """Return a copy of the model, and its optimizer."""
        model = copy.deepcopy(self.model)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-5)

    def sampler(self) -> DistributedSampler[Any] | None:
        """Return a sampler for this process's part of the data, in the order of the data."""
        return DistributedSampler(self.data, self.size, self.rank, shuffle=False) if self.size > 1 else None


Steps = Iterator[nn.Module]
"""Each `next` takes one optimizer step and returns the model."""


def by_hand(setup: Setup) -> Steps:
    """Use DistributedDataParallel with no_sync and gradient_as_bucket_view; on one process, a plain loop."""
    model, optimizer = setup.start()
    net = model
    if setup.size > 1:
        net = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    loader: Any = DataLoader(setup.data, batch_size=setup.micro, sampler=setup.sampler())
    while True:
        for i, (x, y) in enumerate(loader, 1):
            last = i % setup.accumulate == 0
            with nullcontext() if last or setup.size == 1 else net.no_sync():
                loss = setup.loss(net(x), y, "mean")
                (loss if setup.accumulate == 1 else loss / setup.accumulate).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
                yield model


def accelerate(setup: Setup) -> Steps:
    from accelerate import Accelerator

    accelerator: Any = Accelerator(cpu=True, gradient_accumulation_steps=setup.accumulate)
    model, optimizer = setup.start()
    net, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(setup.data, batch_size=setup.micro))
    while True:
        for x, y in loader:
            with accelerator.accumulate(net):
                accelerator.backward(setup.loss(net(x), y, "mean"))
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                yield model


def fabric(setup: Setup) -> Steps:
    from lightning.fabric import Fabric

    lightning: Any = Fabric(accelerator="cpu", devices=setup.size, strategy="ddp" if setup.size > 1 else "auto")
    lightning.launch()
    model, optimizer = setup.start()
    net, optimizer = lightning.setup(model, optimizer)
    loader: Any = lightning.setup_dataloaders(DataLoader(setup.data, batch_size=setup.micro))
    while True:
        for i, (x, y) in enumerate(loader, 1):
            last = i % setup.accumulate == 0
            with lightning.no_backward_sync(net, enabled=not last):
                lightning.backward(setup.loss(net(x), y, "mean") / setup.accumulate)
            if last:
                optimizer.step()
                optimizer.zero_grad()
                yield model


def trainer(setup: Setup) -> Steps:
    import lightning

    model, optimizer = setup.start()

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            x, y = batch
            return setup.loss(self.model(x), y, "mean")

        def configure_optimizers(self) -> Any:
            return optimizer

    def run(on_step: Callable[[], None]) -> None:
        class YieldStep(lightning.Callback):
            def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
                if (index + 1) % setup.accumulate == 0:
                    on_step()

        fitting = lightning.Trainer(
            accelerator="cpu",
            devices=setup.size,
            strategy="ddp" if setup.size > 1 else "auto",
            max_epochs=-1,
            accumulate_grad_batches=setup.accumulate,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=setup.folder,
            use_distributed_sampler=False,  # it would shuffle
            callbacks=[YieldStep()],
        )
        fitting.fit(Module(), DataLoader(setup.data, batch_size=setup.micro, sampler=setup.sampler()))

    return _step_by_step(run, model)


def ignite(setup: Setup) -> Steps:
    import ignite.distributed as idist
    from ignite.engine import Events, create_supervised_trainer

    if setup.size > 1 and not torch.distributed.is_initialized():
        idist.initialize("gloo")
    model, optimizer = setup.start()

    def run(on_step: Callable[[], None]) -> None:
        loader = idist.auto_dataloader(setup.data, batch_size=setup.micro * setup.size, shuffle=False)
        engine = create_supervised_trainer(
            idist.auto_model(model),
            idist.auto_optim(optimizer),
            lambda output, target: setup.loss(output, target, "mean"),
            gradient_accumulation_steps=setup.accumulate,
        )
        engine.add_event_handler(Events.ITERATION_COMPLETED(every=setup.accumulate), on_step)
        engine.run(loader, max_epochs=10**6)

    return _step_by_step(run, model)


def ours(setup: Setup) -> Steps:
    """Use our public loop, without the command."""
    from unisono.config import Settings
    from unisono.distributed.init import build_group
    from unisono.environment import World
    from unisono.testing import build_run

    virtual_ranks = setup.size * setup.accumulate
    settings = Settings(epochs=10**6, batch=setup.micro * virtual_ranks, virtual_ranks=virtual_ranks)
    world = World.current()
    run = build_run(settings, world, build_group(world, torch.device("cpu")), setup.folder)
    model, optimizer = setup.start()
    model = run.place(model)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(setup.data, shuffle=False):
        for x, y in step:
            step.backward(setup.loss(model(x), y, "sum"), weight=y.numel())
        step.update(optimizer)
        yield model


ARMS: dict[str, Callable[[Setup], Steps]] = {
    "by hand": by_hand,
    "Unisono": ours,
    "Ignite": ignite,
    "Fabric": fabric,
    "Accelerate": accelerate,
    "Trainer": trainer,
}
MODULES = {"Ignite": "ignite", "Fabric": "lightning.fabric", "Accelerate": "accelerate", "Trainer": "lightning"}
"""The module that an arm needs in addition to torch."""


def _step_by_step(run: Callable[[Callable[[], None]], None], model: nn.Module) -> Steps:
    """Advance a library's loop step by step: it runs in a greenlet that is suspended at each `on_step`.

    A thread does not work, because it has other torch threads and other locks.
    """
    import greenlet

    main = greenlet.getcurrent()

    def on_step(*_: Any) -> None:
        main.switch()

    loop = greenlet.greenlet(lambda: run(on_step))
    while True:
        loop.switch()
        assert not loop.dead, "the loop ended early"
        yield model
