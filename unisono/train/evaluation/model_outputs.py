"""Run a model over a data set in eval mode: every micro-batch of this process, with the model's output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from unisono import phases
from unisono.data.eval_loader import EvalBatch, EvalLoader
from unisono.errors import RunStopped
from unisono.train.evaluation.model_call import Forward, call

if TYPE_CHECKING:
    from unisono.distributed.process_group import ProcessGroup
    from unisono.train.pipelining.pipeline_run import Pipeline


class ModelOutputs:
    """Iterate over (micro-batch, output) for this process's share of a data set.

    After the last one all processes synchronize, and `count` is the number of micro-batches of all processes. If a
    process has to leave early, RunStopped is raised on all of them.

    forward     forward(model, batch) -> output
    must_leave  returns whether this process has to leave early
    ended       is called after the last forward pass of this process
    restore     is called before every micro-batch: it undoes the changes of the previous one in the models
    speaks      whether the output counts: of several processes with the same outputs, one contributes it
    part        a context that returns the part of a batch that this process computes; by default the whole batch
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loader: EvalLoader,
        *,
        forward: Forward | None,
        must_leave: Callable[[], bool],
        ended: Callable[[], None],
        restore: Callable[[], None],
        pipeline: Pipeline | None = None,
    ) -> None:
        self.model, self.loader, self.pipeline = model, loader, pipeline
        self.group: ProcessGroup = loader.group if pipeline is None else pipeline.world
        self.speaks = pipeline is None or pipeline.speaks
        self.forward, self.must_leave, self.ended, self.restore = forward or call, must_leave, ended, restore
        self.part: Callable[[Any], AbstractContextManager[Any]] = nullcontext
        self.count = 0

    def __iter__(self) -> Iterator[tuple[EvalBatch, Any]]:
        for micro_batch in self.loader if self.pipeline is None else ():
            if self.must_leave() and not self.loader.lockstep:  # otherwise peers would wait for our part of a layer
                break
            self.restore()
            with self.part(micro_batch.batch) as batch:
                output = self.forward(self.model, batch)
            phases.position.moves += 1
            if not micro_batch.spare:
                yield micro_batch._replace(batch=batch), output
        if self.pipeline is not None:
            yield from self.pipeline.walk(self.model, self.loader, self.forward)
        self.ended()
        leaving = torch.tensor([self.must_leave()], dtype=torch.uint8, device=self.group.device)
        if self.group.max_(leaving).item():
            raise RunStopped
        self.count = self.loader.finish()
