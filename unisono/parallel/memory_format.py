"""Parameters that lie in memory in another order than row after row, in channels_last for instance.

FSDP2 takes no such parameters, and a convolution computes with other kernels, to other bits, where its weights lie
otherwise. So these parameters are divided row after row, and whenever something computes with them, it finds a copy of
each in the order that the model's author chose: the numbers of one process, for one copy of a weight a forward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

Slot = tuple[nn.Module, str]
"""Where a parameter is found: a module, and the parameter's name in it."""


class RowStrides:
    """Of some parameters: the strides that they had, in elements."""

    def __init__(self, strides: Mapping[Slot, tuple[int, ...]]) -> None:
        self.strides = strides
        self._held: dict[Slot, nn.Parameter] = {}

    def of(self, names: Iterable[str], module: nn.Module) -> RowStrides:
        """Those of the module's parameters with these names, dots and all."""
        slots = [(module.get_submodule(path), own) for path, _, own in (name.rpartition(".") for name in names)]
        return RowStrides({slot: self.strides[slot] for slot in slots if slot in self.strides})

    def holds(self, module: nn.Module, name: str) -> bool:
        """Return whether the parameter of this name, dots and all, is one of them."""
        path, _, own = name.rpartition(".")
        return (module.get_submodule(path), own) in self.strides

    def listen(self, module: nn.Module) -> None:
        """From now on the module's forward finds them in that order. FSDP2's hooks, which gather and let go, are there
        already: ours come after the one and before the other."""
        if self.strides:
            module.register_forward_pre_hook(self.before)
            module.register_forward_hook(self.behind, prepend=True, always_call=True)

    def before(self, *_: Any) -> None:
        for slot, stride in self.strides.items():
            part, name = slot
            p = part._parameters[name]
            if isinstance(p, nn.Parameter) and p.stride() != stride:  # not by the call around this one
                self._held[slot] = p
                ordered = torch.empty_strided(p.shape, stride, dtype=p.dtype, device=p.device).copy_(p)
                part._parameters[name] = ordered  # type: ignore[assignment]  # its gradient goes on to the parameter

    def behind(self, *_: Any) -> None:
        for (part, name), p in self._held.items():
            part._parameters[name] = p
        self._held = {}


def lay_out_rows(model: nn.Module) -> RowStrides:
    """Lay every parameter row after row. Returns the order of those that lay otherwise."""
    found = {
        (module, name): p.stride()
        for module in model.modules()
        for name, p in module.named_parameters(recurse=False)
        if not p.is_contiguous()
    }
    for p in model.parameters():
        p.data = p.data.contiguous()
    return RowStrides(found)
