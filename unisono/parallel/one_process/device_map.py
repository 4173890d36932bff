"""Split: the layers of one model dealt over the devices of one process, so that it need not fit onto one of them.

    device 0   embedding, layers 0 1 2  --activations-->  device 1   layers 3 4 5, norm, head  --output-->  device 0

One device computes while the others wait: this is for room, not for speed. Every part of a model lies on one device,
with its parameters and buffers, and a hook moves there what goes into it. Parts are dealt in the order in which the
model has them, so that the largest share of bytes is as small as it can be; what belongs to no part lies where the
loop's tensors are, and there the model's output comes back to. The bits are those of one device of the kind: an
accelerator's random numbers travel along with the activations, as if all devices had one generator.
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


def apply_device_map(
    model: nn.Module, devices: Sequence[torch.device], home: torch.device, classes: Sequence[str]
) -> None:
    """Deal a model over `devices`; its inputs and outputs are on `home`.

    Raises LoopError if it has fewer parts than there are devices.
    """
    groups = tied(parts_of(model, outermost(model, classes)))
    if len(groups) < len(devices):
        raise LoopError(
            f"run.place was given a {type(model).__name__}, to be dealt over {len(devices)} devices.",
            f"It has {len(groups)} parts that share no parameter, and each lies on one device as a whole.",
            f"--set parallel.model_parallel_devices={max(len(groups), 1)}, or name smaller layers: --set "
            "'parallel.layer_classes=[\"...\"]'.",
        )
    where = DeviceOf(home)
    for group, number in zip(groups, assign_layers([size_of(group) for group in groups], len(devices)), strict=True):
        for part in group:
            part.to(devices[number])
            part.register_forward_pre_hook(partial(move, where, devices[number]), prepend=True, with_kwargs=True)
    within = {id(part) for group in groups for whole in group for part in whole.modules()}
    held = {p for group in groups for part in group for p in part.parameters()}
    for owner in model.modules():
        if id(owner) not in within:
            for p in owner.parameters(recurse=False):
                p.data = p.data if p in held else p.data.to(home)
            for key, buffer in owner._buffers.items():
                owner._buffers[key] = None if buffer is None else buffer.to(home)
    model.forward = ReturnToFirst(model, where, len(devices))


def parts_of(module: nn.Module, layers: Collection[nn.Module]) -> Iterator[nn.Module]:
    """What lies on one device as a whole: layers, and of what is beside them the largest modules that hold none."""
    for child in module.children():
        if child in layers or not any(part in layers for part in child.modules()):
            if any(True for _ in [*child.parameters(), *child.buffers()]):
                yield child
        else:
            yield from parts_of(child, layers)


def tied(parts: Iterator[nn.Module]) -> list[list[nn.Module]]:
    """Parts in groups that share no parameter with each other, in the order of their first ones."""
    groups: list[list[nn.Module]] = []
    for part in dict.fromkeys(parts):
        params = set(part.parameters())
        sharing = [group for group in groups if any(p in params for other in group for p in other.parameters())]
        joined = [other for group in sharing for other in group] + [part]
        groups = [group for group in groups if group not in sharing[1:]] + ([] if sharing else [[]])
        (sharing[0] if sharing else groups[-1])[:] = joined
    return groups


def size_of(group: Sequence[nn.Module]) -> int:
    """Bytes of what these parts hold."""
    return sum(t.nbytes for t in {t for part in group for t in [*part.parameters(), *part.buffers()]})


def assign_layers(sizes: Sequence[int], count: int) -> list[int]:
    """For each of these, in order, one of `count` devices, so that the largest share is as small as it can be. None of
    them is left without."""
    ends = [0, *accumulate(sizes)]

    @cache
    def best(parts: int, devices: int) -> tuple[int, int]:
        """The largest share of the first `parts` on so many devices, and where that of the last one begins."""
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


class DeviceOf:
    """Where the computation has got to, and with it the random numbers."""

    def __init__(self, home: torch.device) -> None:
        self.home = self.at = home

    def go(self, device: torch.device) -> None:
        """It goes on on another device. A generator's state is 16 bytes in the CPU's memory: nobody waits for it."""
        if device != self.at and device.type == self.at.type != "cpu":
            module = torch.get_device_module(device)
            module.set_rng_state(module.get_rng_state(self.at), device)
        self.at = device


def move(where: DeviceOf, device: torch.device, _: nn.Module, args: Any, kwargs: Any) -> Any:
    """A hook: a part's inputs come to where it lies."""
    where.go(device)
    return tree_map_only(torch.Tensor, lambda t: t.to(device, non_blocking=True), (args, kwargs))


class ReturnToFirst(ForwardWrapper):
    """The forward of a model that is dealt over several devices."""

    def __init__(self, model: nn.Module, where: DeviceOf, count: int) -> None:
        super().__init__(model)
        self.where, self.count = where, count

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        where = self.where
        where.at = where.home  # whatever an error has left behind
        try:
            out = self.forward(*args, **kwargs)
        except RuntimeError as error:
            if "same device" not in str(error):
                raise
            raise LoopError(
                f"{type(self.module).__name__} was to compute on {self.count} devices.",
                f"Its forward brings tensors of two parts together: {str(error).splitlines()[0]}",
                "make one layer of what belongs together, by its class: --set 'parallel.layer_classes=[\"Block\"]'; "
                "or move a "
                "tensor where the other one is: x.to(y.device).",
            ) from error
        where.go(where.home)
        return tree_map_only(torch.Tensor, lambda t: t.to(where.home, non_blocking=True), out)
