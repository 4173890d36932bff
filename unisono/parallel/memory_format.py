"""Keep the memory format of parameters that are not stored row by row, channels_last for instance.

FSDP2 does not take such parameters, and a convolution uses other kernels, with other bits, for weights in another
memory format. So these parameters are sharded row by row. While a forward pass computes with them, each is replaced by
a copy in the format that the model's author chose. That gives the bits of one process, for one copy of a weight in each
forward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from unisono.torch_compat.modules import Slot, parameter_slots


class RowStrides:
    """The strides, in elements, that parameters had before they were stored row by row."""

    def __init__(self, strides: Mapping[Slot, tuple[int, ...]]) -> None:
        self.strides = strides
        self._replaced: dict[Slot, nn.Parameter] = {}

    def of(self, names: Iterable[str], module: nn.Module) -> RowStrides:
        """Return the strides of a module's parameters with these dotted names."""
        slots = [(module.get_submodule(path), own) for path, _, own in (name.rpartition(".") for name in names)]
        return RowStrides({slot: self.strides[slot] for slot in slots if slot in self.strides})

    def holds(self, module: nn.Module, name: str) -> bool:
        """Return whether a module's parameter with this dotted name had other strides."""
        path, _, own = name.rpartition(".")
        return (module.get_submodule(path), own) in self.strides

    def register_hooks(self, module: nn.Module) -> None:
        """Give the module's forward copies in the old format from now on.

        FSDP2's hooks, which gather and free, are registered already: ours run after the first and before the second.
        """
        if self.strides:
            module.register_forward_pre_hook(self.before_forward)
            module.register_forward_hook(self.after_forward, prepend=True, always_call=True)

    def before_forward(self, *_: Any) -> None:
        for slot, stride in self.strides.items():
            part, name = slot
            slots = parameter_slots(part)
            p = slots[name]
            if isinstance(p, nn.Parameter) and p.stride() != stride:  # not replaced by a call around this one
                self._replaced[slot] = p
                copy = torch.empty_strided(p.shape, stride, dtype=p.dtype, device=p.device).copy_(p)
                slots[name] = copy  # type: ignore[assignment]  # autograd passes its gradient on to the parameter

    def after_forward(self, *_: Any) -> None:
        for (part, name), p in self._replaced.items():
            parameter_slots(part)[name] = p
        self._replaced = {}


def lay_out_rows(model: nn.Module) -> RowStrides:
    """Store every parameter row by row, and return the strides of those that were stored in another order."""
    found = {
        (module, name): p.stride()
        for module in model.modules()
        for name, p in module.named_parameters(recurse=False)
        if not p.is_contiguous()
    }
    for p in model.parameters():
        p.data = p.data.contiguous()
    return RowStrides(found)
