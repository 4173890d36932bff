"""What a model makes of a data set: its output for every micro-batch, in eval mode, leaving nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from unisono import phases
from unisono.data.eval_loader import EvalBatch, EvalLoader
from unisono.data.rng import preserve_rng
from unisono.errors import RunStopped
from unisono.train.modules.buffer_sync import slots_of
from unisono.train.modules.module_attributes import remembered

if TYPE_CHECKING:
    from unisono.distributed.process_group import ProcessGroup
    from unisono.train.pipelining.pipeline_run import Pipeline

Forward = Callable[[torch.nn.Module, Any], Any]


class ModelOutputs:
    """Iterate over it for (micro-batch, output) of this process's share of a walk.

    At its end all processes meet, and `count` is how many micro-batches they had together. If one of them was in a
    hurry to leave, it raises Stopped on all of them.

    forward  forward(model, batch) -> output
    hurry    does this process want to leave?
    over     is called when its last forward pass is done
    speaks   is what comes here to be told the others? Of several processes with the same outputs one does
    fresh    is called before every micro-batch: what the last one has changed in the models is as it was
    part     in this context a batch is what this process computes of it: all of it, unless somebody says otherwise
    """

    def __init__(
        self,
        model: torch.nn.Module,
        walk: EvalLoader,
        *,
        forward: Forward | None,
        hurry: Callable[[], bool],
        over: Callable[[], None],
        fresh: Callable[[], None],
        pipeline: Pipeline | None = None,
    ) -> None:
        self.model, self.walk, self.pipeline = model, walk, pipeline
        self.group: ProcessGroup = walk.group if pipeline is None else pipeline.world
        self.speaks = pipeline is None or pipeline.speaks
        self.forward, self.hurry, self.over, self.fresh = forward or call, hurry, over, fresh
        self.part: Callable[[Any], AbstractContextManager[Any]] = nullcontext
        self.count = 0

    def __iter__(self) -> Iterator[tuple[EvalBatch, Any]]:
        for micro_batch in self.walk if self.pipeline is None else ():
            if self.hurry() and not self.walk.abreast:  # others would wait for our part of a layer
                break
            self.fresh()
            with self.part(micro_batch.batch) as batch:
                output = self.forward(self.model, batch)
            phases.Position.moves += 1
            if not micro_batch.spare:
                yield micro_batch._replace(batch=batch), output
        if self.pipeline is not None:
            yield from self.pipeline.walk(self.model, self.walk, self.forward)
        self.over()
        leaves = torch.tensor([self.hurry()], dtype=torch.uint8, device=self.group.device)
        if self.group.max_(leaves).item():
            raise RunStopped
        self.count = self.walk.finish()


def call(model: Callable[..., Any], batch: Any) -> Any:
    """How a batch goes into a model unless the user says otherwise: its first part, or a mapping by name."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch[0]) if isinstance(batch, (list, tuple)) else model(batch)


def parts(batch: Any) -> tuple[Any, ...]:
    """A batch as arguments: a list or tuple gives its parts, anything else is one."""
    return tuple(batch) if isinstance(batch, (list, tuple)) else (batch,)


@contextmanager
def evaluation_mode(models: Sequence[torch.nn.Module], device: torch.device) -> Iterator[Callable[[], None]]:
    """The models in eval mode, without gradients; afterwards all is as before. Gives what `as_before` gives."""
    with restored_rng(models, device) as fresh, torch.no_grad():
        for model in models:
            model.eval()
        yield fresh


@contextmanager
def restored_rng(models: Sequence[torch.nn.Module], device: torch.device) -> Iterator[Callable[[], None]]:
    """Afterwards the models' modes, buffers and attributes and the generators are as before, or the loop's next step
    would depend on which process computed what in here. Gives a function that sets buffers and attributes back."""
    modes = [(part, part.training) for model in models for part in model.modules()]
    slots = [slot for model in models for slot in slots_of(model)]
    for slot in slots:
        slot.remember()
    attributes = remembered(models)

    def fresh() -> None:
        for slot in slots:
            if slot.look() != slot.mark:
                slot.put_back()
        attributes.put_all_back()

    try:
        with preserve_rng(device):
            yield fresh
    finally:
        for part, training in modes:  # not model.train(): a part may be in eval mode for good
            part.training = training
        for slot in slots:
            slot.put_back()
        attributes.put_all_back()
