"""How each of them trains the same thing, as its documentation advises: one function each, advanced step by step.

Everybody walks the data in its own order, takes `accumulate` micro-batches a step on every process, and steps AdamW
with the gradient of the mean loss. So all of them compute the same weights, up to rounding, and laps.py sees to it.
Libraries are imported where they are used: a process that measures one of them loads no other.
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
class Course:
    """What everybody runs.

    rank        of this process, of `size`
    micro       samples that a process takes at a time
    accumulate  micro-batches of a process in a step
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
        """A copy of the model, and its optimizer."""
        model = copy.deepcopy(self.model)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-5)

    def sampler(self) -> DistributedSampler[Any] | None:
        """This process's part of the data, in its own order."""
        return DistributedSampler(self.data, self.size, self.rank, shuffle=False) if self.size > 1 else None


Laps = Iterator[nn.Module]
"""Advanced by one, an arm takes one optimizer step; what it yields is its model."""


def by_hand(course: Course) -> Laps:
    """Plain torch: DistributedDataParallel with no_sync and gradient_as_bucket_view; on one process, just the loop."""
    model, optimizer = course.start()
    net = model
    if course.size > 1:
        net = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    loader: Any = DataLoader(course.data, batch_size=course.micro, sampler=course.sampler())
    while True:
        for i, (x, y) in enumerate(loader, 1):
            last = i % course.accumulate == 0
            with nullcontext() if last or course.size == 1 else net.no_sync():
                loss = course.loss(net(x), y, "mean")
                (loss if course.accumulate == 1 else loss / course.accumulate).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
                yield model


def accelerate(course: Course) -> Laps:
    from accelerate import Accelerator

    accelerator: Any = Accelerator(cpu=True, gradient_accumulation_steps=course.accumulate)
    model, optimizer = course.start()
    net, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(course.data, batch_size=course.micro))
    while True:
        for x, y in loader:
            with accelerator.accumulate(net):
                accelerator.backward(course.loss(net(x), y, "mean"))
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                yield model


def fabric(course: Course) -> Laps:
    from lightning.fabric import Fabric

    lightning: Any = Fabric(accelerator="cpu", devices=course.size, strategy="ddp" if course.size > 1 else "auto")
    lightning.launch()
    model, optimizer = course.start()
    net, optimizer = lightning.setup(model, optimizer)
    loader: Any = lightning.setup_dataloaders(DataLoader(course.data, batch_size=course.micro))
    while True:
        for i, (x, y) in enumerate(loader, 1):
            last = i % course.accumulate == 0
            with lightning.no_backward_sync(net, enabled=not last):
                lightning.backward(course.loss(net(x), y, "mean") / course.accumulate)
            if last:
                optimizer.step()
                optimizer.zero_grad()
                yield model


def trainer(course: Course) -> Laps:
    import lightning

    model, optimizer = course.start()

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            x, y = batch
            return course.loss(self.model(x), y, "mean")

        def configure_optimizers(self) -> Any:
            return optimizer

    def run(hand_over: Callable[[], None]) -> None:
        class Turn(lightning.Callback):
            def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
                if (index + 1) % course.accumulate == 0:
                    hand_over()

        fitting = lightning.Trainer(
            accelerator="cpu",
            devices=course.size,
            strategy="ddp" if course.size > 1 else "auto",
            max_epochs=-1,
            accumulate_grad_batches=course.accumulate,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=course.folder,
            use_distributed_sampler=False,  # it would shuffle
            callbacks=[Turn()],
        )
        fitting.fit(Module(), DataLoader(course.data, batch_size=course.micro, sampler=course.sampler()))

    return _turns(run, model)


def ignite(course: Course) -> Laps:
    import ignite.distributed as idist
    from ignite.engine import Events, create_supervised_trainer

    if course.size > 1 and not torch.distributed.is_initialized():
        idist.initialize("gloo")
    model, optimizer = course.start()

    def run(hand_over: Callable[[], None]) -> None:
        loader = idist.auto_dataloader(course.data, batch_size=course.micro * course.size, shuffle=False)
        engine = create_supervised_trainer(
            idist.auto_model(model),
            idist.auto_optim(optimizer),
            lambda output, target: course.loss(output, target, "mean"),
            gradient_accumulation_steps=course.accumulate,
        )
        engine.add_event_handler(Events.ITERATION_COMPLETED(every=course.accumulate), hand_over)
        engine.run(loader, max_epochs=10**6)

    return _turns(run, model)


def ours(course: Course) -> Laps:
    """The public loop, in a run without the command around it."""
    from unisono.config import Settings
    from unisono.distributed.init import build_group
    from unisono.environment import World
    from unisono.testing import build_run

    virtual_ranks = course.size * course.accumulate
    settings = Settings(epochs=10**6, batch=course.micro * virtual_ranks, virtual_ranks=virtual_ranks)
    world = World.current()
    run = build_run(settings, world, build_group(world, torch.device("cpu")), course.folder)
    model, optimizer = course.start()
    model = run.place(model)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(course.data, shuffle=False):
        for x, y in step:
            step.backward(course.loss(model(x), y, "sum"), weight=y.numel())
        step.update(optimizer)
        yield model


ARMS: dict[str, Callable[[Course], Laps]] = {
    "by hand": by_hand,
    "Unisono": ours,
    "Ignite": ignite,
    "Fabric": fabric,
    "Accelerate": accelerate,
    "Trainer": trainer,
}
MODULES = {"Ignite": "ignite", "Fabric": "lightning.fabric", "Accelerate": "accelerate", "Trainer": "lightning"}
"""What has to be there for an arm, beside torch."""


def _turns(run: Callable[[Callable[[], None]], None], model: nn.Module) -> Laps:
    """A loop that somebody else owns, advanced step by step: it runs on a stack of its own, which is left at each
    `hand_over` and entered again at the next lap. (Not a thread: that would have other torch threads and other locks.)
    """
    import greenlet

    main = greenlet.getcurrent()

    def hand_over(*_: Any) -> None:
        main.switch()

    loop = greenlet.greenlet(lambda: run(hand_over))
    while True:
        loop.switch()
        assert not loop.dead, "it ended before it was asked to"
        yield model
