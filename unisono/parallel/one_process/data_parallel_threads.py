"""Threads: torch's DataParallel, one process with a thread for each of several devices. For those who come from there.

https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html. In every forward pass the model is copied to
all devices anew, a micro-batch is cut into a piece for each, and the outputs come together on the first one, where the
loss is computed, and where the gradient of all copies is added up. Parameters exist once: p.grad, optimizers and
checkpoints know nothing of it. What bits come out depends on the number of devices; docs/guide/parallel/memory.md has
its other disadvantages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from unisono.parallel.layers import ForwardWrapper


def apply_data_parallel(model: nn.Module, devices: Sequence[torch.device]) -> None:
    """From now on the model's forward runs on all of these devices; it lies on the first one."""
    model.to(devices[0])
    model.forward = ThreadedForward(model, devices)


class ThreadedForward(ForwardWrapper):
    """A forward that calls the model's own on copies of the model. It is no wrapper around the model, so that the names
    of parameters do not begin with `module.`, as those of DataParallel do."""

    def __init__(self, model: nn.Module, devices: Sequence[torch.device]) -> None:
        super().__init__(model)
        self.parallel = ThreadParallel(model, list(devices))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.parallel(*args, **kwargs)


class ThreadParallel(nn.DataParallel):
    """DataParallel over a model that has another forward than its class."""

    def replicate(self, module: nn.Module, device_ids: Sequence[int | torch.device]) -> list[nn.Module]:
        replicas = super().replicate(module, device_ids)
        kind = torch.device(self.src_device_obj).type
        precision = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for replica in replicas:
            restore(replica, kind, *precision)
        return replicas


def restore(replica: nn.Module, kind: str, enabled: bool, dtype: torch.dtype) -> None:
    """Give a copy of the model its class's forward, under the autocast that the copies are made in: a thread begins
    with torch's own dtype. What is hooked around the model's forward happens once, with the whole micro-batch."""
    own: Callable[..., Any] = type(replica).forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(kind, dtype=dtype, enabled=enabled):
            return own(replica, *args, **kwargs)

    vars(replica).update(forward=forward)
    for hooks in ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks"):
        setattr(replica, hooks, type(getattr(replica, hooks))())
