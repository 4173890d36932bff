"""Count the memory of a script's step without computing it: its model and its micro-batches are fake tensors.

A fake tensor has a shape, a dtype and a device, but no memory (torch's FakeTensorMode). So a model that is larger than
this machine can be counted in seconds. The script runs in one process up to its loop, as in a dry run
(train/diagnostics/dry_run.py), and gets two steps of two micro-batches. Their data are real samples made fake.

A script whose loop needs the values of tensors (loss.item(), a choice that depends on data) cannot be counted so. The
record then has the reason.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only
from torch.utils.data import default_collate

from unisono.config import Settings
from unisono.data.computed_batches import IndexDataset, as_data_set
from unisono.data.loader import Collate, length_of
from unisono.data.rng import seed_everything
from unisono.distributed.process_group import ProcessGroup
from unisono.environment import World
from unisono.parallel.activation_checkpoint import apply_activation_checkpoint
from unisono.parallel.param_dtype import apply_param_dtype
from unisono.parallel.precision import apply_precision
from unisono.plan.batch_order import BatchOrder
from unisono.plan.rng_keys import SCRIPT, mix
from unisono.torch_compat.modules import buffer_slots, parameter_slots
from unisono.train.context import build_context
from unisono.train.costs.live_memory import LiveMemory
from unisono.train.costs.memory_parts import MemoryCount, lengths, state_bytes, write_record
from unisono.train.diagnostics.dry_run import DryRun, LoopReached
from unisono.train.evaluation.model_call import Forward, call, parts
from unisono.train.lifecycle import close
from unisono.train.loop import SyncLoop

S = TypeVar("S", bound=Settings)

STEPS = 2
"""The optimizer makes its state in the first step."""


def count_fake_step(train: Callable[[Any], None], settings: Settings, world: World, folder: Path) -> None:
    """Run a script up to the end of its second step with fake tensors, and write what the step needs.

    Args:
        train: The script's function.
        settings: The settings of the run, whose order of samples is counted for one process.
        world: The place of this process.
        folder: The folder for the record, which has "failed" if the script cannot be counted.
    """
    with ExitStack() as kept:
        nowhere = kept.enter_context(open(os.devnull, "w", encoding="utf-8"))
        loop = SyncLoop(settings, ProcessGroup())
        context = build_context(settings, loop, world=world, run_dir=folder, output=nowhere)
        kept.callback(close, context)
        run: FakeRun[Settings] = FakeRun(context, loop)
        seed_everything(mix(settings.seed, SCRIPT))
        reason = "its loop has no step"
        try:
            train(run)
        except LoopReached:
            reason = ""
        except Exception as error:
            reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
        run.end()
        found = run.record()
        write_record(folder, found if found is not None and not reason else {"failed": reason})


class FakeRun(DryRun[S]):
    """The run, as its script sees it: models are fake."""

    def __init__(self, context: Any, loop: SyncLoop) -> None:
        super().__init__(context, loop)
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.optimizers: dict[int, torch.optim.Optimizer] = {}
        self.count = MemoryCount(context.models.modules, context.settings)
        self._order: BatchOrder | None = None
        self._open = ExitStack()

    def place(self, model: Any, **_: Any) -> Any:
        """Build a model of fake tensors, or make a ready one fake."""
        parallel = self.settings.parallel
        with self.fake:
            placed: nn.Module = model if isinstance(model, nn.Module) else model()
        make_fake(placed, self.fake)
        if parallel.param_dtype != "fp32":
            apply_param_dtype(placed, parallel)
        if parallel.activation_checkpoint != "none":
            apply_activation_checkpoint(placed, parallel.activation_checkpoint, parallel.layer_classes)
        apply_precision(placed, self.settings.precision, self.device)
        self.context.models.modules.append(placed)
        return placed

    def steps(self, data: Any = None, *, collate_fn: Collate | None = None, **_: Any) -> Iterator[Any]:
        """Yield two steps, which are counted."""
        settings = self.settings
        data = as_data_set(data, settings)
        length = length_of(data, "The training set")
        self._order = order = BatchOrder(
            length=length,
            batch=settings.batch,
            virtual_ranks=settings.virtual_ranks,
            micro_batch=settings.micro_batch,
            seed=settings.seed,
            shuffle=False,
        )
        first, last = order.micro_bounds(0, 0)[0]
        if isinstance(data, IndexDataset):
            self._open.enter_context(self.fake)
            batch = data.micro_batch(0, range(last - first))
        else:
            rows = [data[i] for i in range(last - first)]
            batch = (collate_fn or default_collate)(rows)
            batch = tree_map_only(torch.Tensor, partial(self.fake.from_tensor, static_shapes=True), batch)
            self._open.enter_context(self.fake)
        for number in range(STEPS):
            yield FakeStep(self, number, settings.batch, batch)
        raise LoopReached

    def end(self) -> None:
        """Leave the mode in which tensors are fake."""
        self._open.close()

    def record(self) -> dict[str, Any] | None:
        """Return what was counted; None: no micro-batch was."""
        if self._order is None or "first" not in self.count.found:
            return None
        order, models = self._order, self.context.models.modules
        return self.count.found | {
            "state": state_bytes(models, self.optimizers.values(), self.settings),
            "micro_batches": [len(order.micro_bounds(0, v)) for v in range(order.virtual_ranks)],
            "samples": order.batch_size(0),
            "threads": self.settings.threads,
            "recompute": self.settings.parallel.activation_checkpoint,
            "precision": self.settings.precision,
            **lengths(self.settings, order.steps_per_epoch),
        }


class FakeStep:
    """A step of two micro-batches, as the script's loop sees it. Sums and norms are 1."""

    epoch = 0
    loss = grad_norm = noise_scale = 1.0
    skipped = False
    counts = True

    def __init__(self, run: FakeRun[Any], number: int, samples: int, batch: Any) -> None:
        self.number, self.samples = number, samples
        self._run, self._batch = run, batch
        self._memory: LiveMemory | None = None

    def __iter__(self) -> Iterator[Any]:
        return self._rounds()

    def over(self, *optimizers: Any) -> Iterator[Any]:
        """Yield the micro-batches."""
        return self._rounds()

    def _rounds(self) -> Iterator[Any]:
        for name in ("first", "next"):
            with self._run.count.micro_batch(name, self._batch) as self._memory:
                yield self._batch
        self._memory = None

    def backward(self, loss: torch.Tensor, weight: Any, *, mean: bool = False) -> None:
        """Compute the backward pass."""
        assert self._memory is not None
        self._run.count.forward_done(self._memory)
        loss.backward()

    def run(
        self, model: nn.Module, loss_fn: Any, *, forward: Forward | None = None, mean: bool = False, over: Any = ()
    ) -> None:
        """Compute all micro-batches."""
        for batch in self.over(*over):
            loss, weight = loss_fn((forward or call)(model, batch), *parts(batch))
            self.backward(loss, weight, mean=mean)

    def update(self, *steppers: Any, clip: float | None = None) -> None:
        """Step the optimizers, and remove the gradients. Schedules step as in a run."""
        with self._run.count.update():
            for each in steppers:
                if isinstance(each, torch.optim.Optimizer):
                    self._run.optimizers[id(each)] = each
                    each.step()
        for each in steppers:
            if isinstance(each, torch.optim.Optimizer):
                each.zero_grad(set_to_none=True)
            else:
                each.step()

    def every(self, steps: int, **_: Any) -> bool:
        """Return False: what is due at times is not counted."""
        return False

    def add(self, *_: Any, **__: Any) -> None:
        """Do nothing: sums need values."""


def make_fake(model: nn.Module, mode: FakeTensorMode) -> None:
    """Replace parameters and buffers that are real by fake ones, in place. Shared ones stay shared."""
    found: dict[int, Any] = {}

    def fake(tensor: torch.Tensor) -> Any:
        if id(tensor) not in found:
            made: Any = mode.from_tensor(tensor.detach(), static_shapes=True)
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            found[id(tensor)] = made
        return found[id(tensor)]

    for module in model.modules():
        for slots in (parameter_slots(module), buffer_slots(module)):
            for name, tensor in slots.items():
                if tensor is not None and not mode.is_our_fake(tensor):
                    slots[name] = fake(tensor)
