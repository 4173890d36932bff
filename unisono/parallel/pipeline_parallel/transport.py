"""What goes from stage to stage of a pipeline, what comes back for it, and what a stage's parameters get of that."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn


class ActivationSpec(NamedTuple):
    """What a tensor that travels is like. Strides are those of one that fills its memory, in some order of dims."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def floats(self) -> bool:
        """Does a gradient come back for it?"""
        return self.dtype.is_floating_point or self.dtype.is_complex

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


def like(tensor: torch.Tensor) -> ActivationSpec:
    return ActivationSpec(tensor.dtype, tuple(tensor.shape), torch.empty_like(tensor, device="meta").stride())


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as one row, dim after dim as `like` says: what a message can carry."""
    dense, kind = tensor.detach(), like(tensor)
    if dense.stride() != kind.stride:
        dense = kind.empty(tensor.device).copy_(dense)
    return dense.as_strided((prod(kind.shape),), (1,), dense.storage_offset())


def laid_out(grad: torch.Tensor, kind: ActivationSpec) -> torch.Tensor:
    """A gradient as the other end of the line has room for it; autograd gives some transposed."""
    return grad if grad.stride() == kind.stride else kind.empty(grad.device).copy_(grad)


class ReceivedActivation(torch.autograd.Function):
    """What was received, as something that was computed: a layer may begin with what works in place. The gradient is
    left at an anchor, which has its shape, and next to no memory."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def comes_from(output: torch.Tensor, inputs: Sequence[torch.Tensor]) -> bool:
    """Does an output depend on one of these, which are leaves?"""
    wanted, seen = set(map(id, inputs)), set[Any]()
    waiting: list[Any] = [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if id(getattr(node, "variable", None)) in wanted:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
    return False


class accumulating:  # used as a context
    """torch writes the gradients of a zero-bubble schedule's weights into p.grad itself; here they go there as
    autograd's do, past the hooks that run after accumulation."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.params = params

    def __enter__(self) -> None:
        self.before = [p.grad for p in self.params]
        for p in self.params:
            p.grad = None

    def __exit__(self, *error: object) -> None:
        for p, held in zip(self.params, self.before, strict=True):
            new = p.grad
            p.grad = held
            if new is not None:
                p.grad = new if held is None else held.add_(new)
                for hook in (p._post_accumulate_grad_hooks or {}).values():
                    hook(p)
