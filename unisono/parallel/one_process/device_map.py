"""Divide the layers of one model over several devices of one process, so that it need not fit onto one of them.

    device 0   embedding, layers 0 1 2  --activations-->  device 1   layers 3 4 5, norm, head  --output-->  device 0

One device computes while the others wait: this saves memory, not time. Each part of a model is on one device, with its
parameters and buffers, and a hook moves its inputs there. Parts are assigned in the order of the model, so that the
largest share of bytes is as small as possible. Parameters outside of all parts are on the home device, to which the
output returns. The bits are those of one device of the kind: an accelerator's RNG state moves with the activations, as
if all devices had one generator.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from unisono.errors import LoopError
from unisono.parallel.layers import ForwardWrapper, outermost
from unisono.torch_compat.modules import buffer_slots


def apply_device_map(
    model: nn.Module, devices: Sequence[torch.device], home: torch.device, classes: Sequence[str]
) -> None:
    """Divide a model over `devices`; its inputs and outputs are on `home`.

    Raises:
        LoopError: It has fewer parts than there are devices.
    """
    groups = tied_groups(parts_of(model, outermost(model, classes)))
    if len(groups) < len(devices):
        raise LoopError(
            f"Cannot divide a {type(model).__name__} over {len(devices)} devices: it has too few parts.",
            f"It has {len(groups)} parts that share no parameter, and each must be on one device.",
            f"--set parallel.model_parallel_devices={max(len(groups), 1)}, or name smaller layers: --set "
            "'parallel.layer_classes=[\"...\"]'.",
        )
    current = CurrentDevice(home)
    for group, number in zip(groups, assign_layers([size_of(group) for group in groups], len(devices)), strict=True):
        for part in group:
            part.to(devices[number])
            part.register_forward_pre_hook(
                partial(move_inputs, current, devices[number]), prepend=True, with_kwargs=True
            )
    inside = {id(part) for group in groups for root in group for part in root.modules()}
    moved = {p for group in groups for part in group for p in part.parameters()}
    for owner in model.modules():
        if id(owner) not in inside:
            for p in owner.parameters(recurse=False):
                p.data = p.data if p in moved else p.data.to(home)
            slots = buffer_slots(owner)
            for key, buffer in slots.items():
                slots[key] = None if buffer is None else buffer.to(home)
    model.forward = ReturnToFirst(model, current, len(devices))


def parts_of(module: nn.Module, layers: Collection[nn.Module]) -> Iterator[nn.Module]:
    """Yield the parts that each are on one device: layers, and the largest other modules that contain none."""
    for child in module.children():
        if child in layers or not any(part in layers for part in child.modules()):
            if any(True for _ in [*child.parameters(), *child.buffers()]):
                yield child
        else:
            yield from parts_of(child, layers)


def tied_groups(parts: Iterator[nn.Module]) -> list[list[nn.Module]]:
    """Group parts so that no two groups share a parameter, in the order of their first parts."""
    groups: list[list[nn.Module]] = []
    for part in dict.fromkeys(parts):
        params = set(part.parameters())
        sharing = [group for group in groups if any(p in params for other in group for p in other.parameters())]
        joined = [other for group in sharing for other in group] + [part]
        groups = [group for group in groups if group not in sharing[1:]] + ([] if sharing else [[]])
        (sharing[0] if sharing else groups[-1])[:] = joined
    return groups


def size_of(group: Sequence[nn.Module]) -> int:
    """Return the bytes of the parameters and buffers of these parts."""
    return sum(t.nbytes for t in {t for part in group for t in [*part.parameters(), *part.buffers()]})


def assign_layers(sizes: Sequence[int], count: int) -> list[int]:
    """Assign each item to one of `count` devices, in order, so that the largest share is as small as possible.

    Every device gets an item.
    """
    ends = [0, *accumulate(sizes)]

    @cache
    def best(parts: int, devices: int) -> tuple[int, int]:
        """Return the largest share of the first `parts` on `devices` devices, and the first part of the last one."""
        if devices == 1:
            return ends[parts], 0
        return min(
            (max(best(first, devices - 1)[0], ends[parts] - ends[first]), first) for first in range(devices - 1, parts)
        )

    found: list[int] = []
    for device in range(count - 1, -1, -1):
        _, first = best(len(sizes) - len(found), device + 1)
        found += [device] * (len(sizes) - len(found) - first)
    return found[::-1]


class CurrentDevice:
    """The device on which the forward pass computes now, and the RNG state with it."""

    def __init__(self, home: torch.device) -> None:
        self.home = self.device = home

    def move_to(self, device: torch.device) -> None:
        """Continue on another device. A generator's state is 16 bytes on the CPU, so no device waits for it."""
        if device != self.device and device.type == self.device.type != "cpu":
            module = torch.get_device_module(device)
            module.set_rng_state(module.get_rng_state(self.device), device)
        self.device = device


def move_inputs(current: CurrentDevice, device: torch.device, _: nn.Module, args: Any, kwargs: Any) -> Any:
    """Move the inputs of a part to its device. A forward pre-hook."""
    current.move_to(device)
    return tree_map_only(torch.Tensor, lambda t: t.to(device, non_blocking=True), (args, kwargs))


class ReturnToFirst(ForwardWrapper):
    """Run the forward of a model that is divided over several devices, and move its output to the home device."""

    def __init__(self, model: nn.Module, current: CurrentDevice, count: int) -> None:
        super().__init__(model)
        self.current, self.count = current, count

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        current = self.current
        current.device = current.home  # an error may have left it on another one
        try:
            out = self.forward(*args, **kwargs)
        except RuntimeError as error:
            if "same device" not in str(error):
                raise
            raise LoopError(
                f"{type(self.module).__name__}, divided over {self.count} devices, combines tensors of two devices.",
                f"Its forward combines tensors of two parts: {str(error).splitlines()[0]}",
                "put both parts into one layer, by its class: --set 'parallel.layer_classes=[\"Block\"]'; or move one "
                "tensor to the device of the other: x.to(y.device).",
            ) from error
        current.move_to(current.home)
        return tree_map_only(torch.Tensor, lambda t: t.to(current.home, non_blocking=True), out)
