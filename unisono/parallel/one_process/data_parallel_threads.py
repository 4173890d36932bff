"""torch's DataParallel: one process with a thread for each of several devices.

https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html. In every forward pass the model is copied to
all devices, and a micro-batch is cut into a piece for each. The outputs are gathered on the first device, where the
loss is computed and the gradients of all copies are added up. Parameters exist once, so p.grad, optimizers and
checkpoints do not change. The bits depend on the number of devices. In each forward pass, the random number generators
of the other devices are seeded from that of the first one, which the run seeds for each micro-batch.
docs/guide/parallel/memory.md lists the disadvantages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from unisono.parallel.layers import ForwardWrapper
from unisono.plan.rng_keys import mix


def apply_data_parallel(model: nn.Module, devices: Sequence[torch.device]) -> None:
    """Run the model's forward on all of these devices. Its parameters are on the first one."""
    model.to(devices[0])
    model.forward = ThreadedForward(model, devices)


class ThreadedForward(ForwardWrapper):
    """Call the model's forward on copies of the model.

    It wraps the forward, not the model, so the names of parameters do not begin with `module.` as in DataParallel.
    """

    def __init__(self, model: nn.Module, devices: Sequence[torch.device]) -> None:
        super().__init__(model)
        self.parallel = ThreadParallel(model, list(devices))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.parallel(*args, **kwargs)


class ThreadParallel(nn.DataParallel):
    """DataParallel over a model whose forward is wrapped."""

    def replicate(self, module: nn.Module, device_ids: Sequence[int | torch.device]) -> list[nn.Module]:
        replicas = super().replicate(module, device_ids)
        seed_other_devices(
            [torch.device(self.src_device_obj.type, place) for place in self.device_ids[: len(replicas)]]
        )
        device_type = torch.device(self.src_device_obj).type
        enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
        for replica in replicas:
            restore_forward(replica, device_type, enabled, dtype)
        return replicas


def seed_other_devices(devices: Sequence[torch.device]) -> None:
    """Seed the generators of all devices but the first from the state of the first one, each in its own way.

    Otherwise dropout on them would depend on what they have computed before. CPU devices share one generator.
    """
    if devices[0].type == "cpu":
        return
    module = torch.get_device_module(devices[0])
    state = mix(*module.get_rng_state(devices[0]).tolist())
    for number, device in enumerate(devices[1:], 1):
        with module.device(device):
            module.manual_seed(mix(state, number) & 0x7FFF_FFFF_FFFF_FFFF)


def restore_forward(replica: nn.Module, device_type: str, enabled: bool, dtype: torch.dtype) -> None:
    """Give a copy of the model the forward of its class, under the autocast of the calling thread.

    A new thread begins with torch's default dtype. Hooks around the model's forward are removed from the copy: they run
    once, with the whole micro-batch.
    """
    own: Callable[..., Any] = type(replica).forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, dtype=dtype, enabled=enabled):
            return own(replica, *args, **kwargs)

    vars(replica).update(forward=forward)
    for hooks in ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks"):
        setattr(replica, hooks, type(getattr(replica, hooks))())
