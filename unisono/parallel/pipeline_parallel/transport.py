"""Activations that are sent from stage to stage of a pipeline, and the gradients that are sent back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn

from unisono.torch_compat.modules import accumulation_hooks


class ActivationSpec(NamedTuple):
    """The dtype, shape and strides of a tensor that is sent. The strides are dense, in any order of dims."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def is_differentiable(self) -> bool:
        """Whether a gradient is sent back for it."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


def spec_of(tensor: torch.Tensor) -> ActivationSpec:
    return ActivationSpec(tensor.dtype, tuple(tensor.shape), torch.empty_like(tensor, device="meta").stride())


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's memory as a row that a message can carry, in the order of `spec_of`."""
    dense, spec = tensor.detach(), spec_of(tensor)
    if dense.stride() != spec.stride:
        dense = spec.empty(tensor.device).copy_(dense)
    return dense.as_strided((prod(spec.shape),), (1,), dense.storage_offset())


def with_strides(grad: torch.Tensor, spec: ActivationSpec) -> torch.Tensor:
    """Return a gradient with the strides that the receiver expects; autograd returns some gradients transposed."""
    return grad if grad.stride() == spec.stride else spec.empty(grad.device).copy_(grad)


class ReceivedActivation(torch.autograd.Function):
    """Turn a received tensor into the result of an operation, because a layer may begin with an in-place operation.

    Its gradient is left at an anchor, a leaf with its shape and next to no memory.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def depends_on(output: torch.Tensor, inputs: Sequence[torch.Tensor]) -> bool:
    """Return whether an output depends on one of these leaves."""
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


@contextmanager
def accumulating(params: Sequence[nn.Parameter]) -> Iterator[None]:
    """Accumulate the gradients that torch writes to p.grad within this block, as autograd would.

    A zero-bubble schedule writes the gradients of weights to p.grad itself, without calling the hooks that run after
    accumulation. This block calls them.
    """
    before = [p.grad for p in params]
    for p in params:
        p.grad = None
    try:
        yield
    finally:
        for p, held in zip(params, before, strict=True):
            new = p.grad
            p.grad = held
            if new is not None:
                p.grad = new if held is None else held.add_(new)
                for hook in accumulation_hooks(p):
                    hook(p)
