"""What holds memory in a training step: parameters, buffers, optimizer state, gradients, activations.

Two micro-batches are counted, one after the other. The first one finds no gradients, so gradients appear while
activations disappear. The second one adds to gradients that exist.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from unisono.distributed.process_group import to_local
from unisono.errors import LoopError, RunStopped
from unisono.parallel.fsdp.fsdp import own_parameters
from unisono.parallel.layers import layers_of, outermost, untied
from unisono.security.file_modes import make_folder, write_text
from unisono.train.batches.spare_rounds import SpareRounds, gradients_aside
from unisono.train.context import Inspection, LoopParts, RunContext
from unisono.train.costs.live_memory import LiveMemory, bytes_of
from unisono.train.extensions import Extension
from unisono.train.gradient_pass import GradientPass
from unisono.train.step_state import StepState

if TYPE_CHECKING:
    from unisono.config import Settings

RECORD = "parts.json"
"""The file with what was counted."""


class MemoryCount:
    """The memory of two micro-batches and one update.

    Args:
        models: The models.
        settings: The settings of the run.
    """

    def __init__(self, models: Sequence[nn.Module], settings: Settings) -> None:
        self.models, self.settings = models, settings
        self.found: dict[str, Any] = {"activations": 0, "flops": 0, "update": 0}

    @contextmanager
    def micro_batch(self, name: str, batch: Any = None) -> Iterator[LiveMemory]:
        """Count a micro-batch, which is called `name`: "first" or "next"."""
        params = [p for model in self.models for p in model.parameters()]
        known = [*tensors_of(self.models), *(p.grad for p in params if p.grad is not None)]
        memory = LiveMemory([*known, *(leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))])
        with FlopCounterMode(display=False) as counter, memory, memory.naming(named_layers(self.models, self.settings)):
            yield memory
        self.found[name] = max(self.found.get(name, 0), memory.peak)
        self.found["flops"] = max(self.found["flops"], counter.get_total_flops())

    def forward_done(self, memory: LiveMemory) -> None:
        """Note the activations, which are complete when backward begins."""
        if memory.live > self.found["activations"]:
            self.found["activations"], self.found["layers"] = memory.live, memory.by_layer()

    @contextmanager
    def update(self) -> Iterator[None]:
        """Count an update, whose optimizer state exists already."""
        with LiveMemory() as memory:
            yield
        self.found["update"] = max(self.found["update"], memory.peak - max(memory.live, 0))


class MemoryParts(Extension):
    """Count a micro-batch of the second step, and the update of this step. Then end the run.

    Args:
        folder: The folder for the record.
        context: The context of the run.
        parts: The parts of its loop.
    """

    def __init__(self, folder: Path, context: RunContext, parts: LoopParts) -> None:
        self._folder, self._context, self._parts = folder, context, parts
        self._spare = SpareRounds(parts.source, context.models, parts.checks)
        self._count = MemoryCount(context.models.modules, context.settings)
        self._memory: LiveMemory | None = None
        self._counts = False

    def before_step(self, step: StepState) -> None:
        if step.number == 2:
            raise RunStopped
        self._counts = step.number == 1

    def extra_rounds(self, step: StepState, gradient: GradientPass) -> Iterator[Any]:
        if not self._counts:
            return
        gradient.prepare()
        with gradients_aside(gradient):
            for name in ("first", "next"):
                with self._count.micro_batch(name) as self._memory:
                    rounds = self._spare.rounds(step, gradient, 0)
                    yield next(rounds)
                    rounds.close()  # type: ignore[attr-defined]
        self._memory = None

    def backward(self, step: StepState, loss: torch.Tensor, weight: float | torch.Tensor) -> None:
        if self._memory is not None:
            self._count.forward_done(self._memory)

    def stepping(self, optimizer: Any) -> AbstractContextManager[None]:
        return self._count.update() if self._counts else nullcontext()

    def updated(self, step: StepState) -> None:
        if self._counts:
            models, steppers = self._context.models.modules, self._parts.checks.steppers
            write_record(
                self._folder, self._count.found | {"state": state_bytes(models, steppers, self._context.settings)}
            )


def tensors_of(models: Iterable[nn.Module]) -> list[torch.Tensor]:
    """Return the parameters and buffers of models."""
    return [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]


def named_layers(models: Sequence[nn.Module], settings: Settings) -> dict[str, nn.Module]:
    """Return the outermost layers of models by name. A model without layers has none."""
    found = {}
    for number, model in enumerate(models):
        prefix = f"{number}." if len(models) > 1 else ""
        names = {module: name for name, module in model.named_modules()}
        for layer in _layers(outermost, model, settings):
            if layer is not model:
                found[f"{prefix}{names[layer]}"] = layer
    return found


def state_bytes(models: Sequence[nn.Module], steppers: Iterable[Any], settings: Settings) -> dict[str, Any]:
    """Return the bytes of what exists between two steps on this process.

    Returns:
        parameters, buffers, gradients (of trained parameters), optimizer, and the groups of parameters that shards are
        gathered in: [bytes, bytes of those that are trained] of each, the model's own last.
    """
    params = list({id(p): p for model in models for p in model.parameters()}.values())
    states = [dict(each.state) for each in steppers if isinstance(each, torch.optim.Optimizer)]
    return {
        "parameters": bytes_of(to_local(p.detach()) for p in params),
        "buffers": bytes_of(buffer for model in models for buffer in model.buffers()),
        "gradients": sum(to_local(p.detach()).nbytes for p in params if p.requires_grad),
        "optimizer": bytes_of(to_local(t.detach()) for t in tree_leaves(states) if isinstance(t, torch.Tensor)),
        "groups": [group for model in models for group in shard_groups(model, settings)],
    }


def lengths(settings: Settings, epoch_steps: int) -> dict[str, int]:
    """Return the steps of an epoch and those of the run."""
    steps = settings.steps if settings.steps is not None else (settings.epochs or 1) * epoch_steps
    return {"epoch_steps": epoch_steps, "total_steps": steps}


def shard_groups(model: nn.Module, settings: Settings) -> list[tuple[int, int]]:
    """Return the bytes of the parameters that FSDP gathers together, and of those of them that are trained."""
    modules = untied(model, [*_layers(layers_of, model, settings), model])
    found = []
    for module in modules:
        names = own_parameters(module, [other for other in modules if other is not module])
        params = [to_local(module.get_parameter(name).detach()).nbytes for name in names]
        trained = [module.get_parameter(name).requires_grad for name in names]
        found.append((sum(params), sum(size for size, trains in zip(params, trained, strict=True) if trains)))
    return found


def _layers(find: Any, model: nn.Module, settings: Settings) -> list[nn.Module]:
    try:
        return list(find(model, settings.parallel.layer_classes))
    except LoopError:  # the classes that the settings name are those of another model
        return []


def write_record(folder: Path, content: Mapping[str, Any]) -> None:
    """Write what was counted."""
    make_folder(folder)
    write_text(folder / RECORD, json.dumps(content) + "\n")


def count_memory(request: str, rank: int) -> Inspection:
    """Return an inspection that counts memory. `request`: the folder for the record; `rank`: of this process."""
    return Inspection(partial(MemoryParts, Path(request)))
