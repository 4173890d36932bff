"""Call a model on a batch, and leave models and random number generators as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from unisono.data.rng import preserve_rng
from unisono.train.modules.buffer_sync import slots_of
from unisono.train.modules.module_attributes import remembered

Forward = Callable[[torch.nn.Module, Any], Any]


class Evaluation(NamedTuple):
    """The arguments of a call of `run.evaluate` (see Run.evaluate)."""

    model: torch.nn.Module
    data: Any
    measure: Callable[..., Any]
    forward: Forward | None
    collate: Callable[[list[Any]], Any] | None


def call(model: Callable[..., Any], batch: Any) -> Any:
    """Call a model on a batch as the default `forward` does: with its first part, or with a mapping's items by name."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch[0]) if isinstance(batch, (list, tuple)) else model(batch)


class LossCall(NamedTuple):
    """A model and its loss, as a function of a batch.

    model    the model
    loss_fn  loss_fn(output, *batch) -> (sum, weight); a mapping is one argument
    forward  forward(model, batch) -> output
    """

    model: torch.nn.Module
    loss_fn: Callable[..., tuple[torch.Tensor, Any]]
    forward: Forward

    def __call__(self, batch: Any) -> tuple[torch.Tensor, Any]:
        return self.loss_fn(self.forward(self.model, batch), *parts(batch))


def parts(batch: Any) -> tuple[Any, ...]:
    """Return a batch as positional arguments: the parts of a list or tuple, or one argument."""
    return tuple(batch) if isinstance(batch, (list, tuple)) else (batch,)


@contextmanager
def evaluation_mode(models: Sequence[torch.nn.Module], device: torch.device) -> Iterator[Callable[[], None]]:
    """Put models in eval mode without gradients within this block, and restore everything afterward.

    Yields the function that `restored_rng` yields.
    """
    with restored_rng(models, device) as restore, torch.no_grad():
        for model in models:
            model.eval()
        yield restore


@contextmanager
def restored_rng(models: Sequence[torch.nn.Module], device: torch.device) -> Iterator[Callable[[], None]]:
    """Restore modes, buffers and attributes of the models, and all random number generators, after this block.

    Otherwise the next step would depend on the samples that this process computed here. Yields a function that
    restores the buffers and attributes at once.
    """
    modes = [(part, part.training) for model in models for part in model.modules()]
    slots = [slot for model in models for slot in slots_of(model)]
    for slot in slots:
        slot.remember()
    attributes = remembered(models)

    def restore() -> None:
        for slot in slots:
            if slot.look() != slot.mark:
                slot.put_back()
        attributes.put_all_back()

    try:
        with preserve_rng(device):
            yield restore
    finally:
        for part, training in modes:  # not model.train(): a part may be in eval mode permanently
            part.training = training
        for slot in slots:
            slot.put_back()
        attributes.put_all_back()
