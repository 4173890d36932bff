"""Parameters that lie in memory in another order than row after row, in channels_last for instance.

FSDP2 takes no such parameters, and a convolution computes with other kernels, to other bits, where its weights lie
otherwise. So these parameters are divided row after row, and whenever their module computes, it finds a copy of each in
the order that the model's author chose: the numbers of one process, for one copy of a weight a forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


class Strides:
    """Of one module's parameters: the strides of those that lay otherwise, in elements, by name."""

    def __init__(self, strides: Mapping[str, tuple[int, ...]]) -> None:
        self.strides = strides
        self._held: dict[str, nn.Parameter | None] = {}

    def listen(self, module: nn.Module) -> None:
        """From now on the module's forward finds them in that order. FSDP2's hooks, which gather and let go, are there
        already: ours come after the one and before the other."""
        module.register_forward_pre_hook(self.before)
        module.register_forward_hook(self.behind, prepend=True, always_call=True)

    def before(self, module: nn.Module, _: Any) -> None:
        for name, stride in self.strides.items():
            p = self._held[name] = module._parameters[name]
            assert p is not None
            ordered = torch.empty_strided(p.shape, stride, dtype=p.dtype, device=p.device).copy_(p)
            module._parameters[name] = ordered  # type: ignore[assignment]  # its gradient goes on to the parameter

    def behind(self, module: nn.Module, *_: Any) -> None:
        module._parameters.update(self._held)
        self._held = {}


def apply_rows(model: nn.Module) -> list[tuple[nn.Module, Strides]]:
    """Lay every parameter row after row. Returns the modules that had one in another order, with that."""
    found = []
    for module in model.modules():
        own = module.named_parameters(recurse=False)
        strides = {name: p.stride() for name, p in own if not p.is_contiguous()}
        if strides:
            found.append((module, Strides(strides)))
    for p in model.parameters():
        p.data = p.data.contiguous()
    return found
