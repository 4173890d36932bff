"""Accumulate gradients: copies of a gradient to which autograd and other virtual ranks add.

A micro-batch's gradient is written or added to a copy as soon as autograd has accumulated it (`fill`). A copy of
another virtual rank is added to it parameter by parameter (`merge`), while it is in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from unisono.distributed.process_group import from_local_like, is_dtensor, to_local
from unisono.distributed.shared_memory import SharedMemory
from unisono.exchange.buckets import BucketLayout, version_of


class FlatGradient:
    """A copy of the gradient that is sent: a flat buffer for each bucket, and a view for each parameter.

    Autograd writes the first gradient of a parameter to memory of its own; `fill` copies it here while it is still in
    the processor's cache. That is cheaper than zeroing the buffers and letting autograd add, and has the same bits. It
    is stored as 0 + g, which is g, except that -0 becomes +0. So no sum is ever -0, and an absent gradient counts as
    zeros.

    Args:
        layout: The buckets.
        shared: Use memory that neighbors can open (for buckets on the CPU).
    """

    def __init__(self, layout: BucketLayout, *, shared: bool = False) -> None:
        self.memory = SharedMemory(layout.bytes_shared) if shared else None
        if self.memory is not None:
            self.flats = layout.cut(self.memory.bytes)
        else:
            self.flats = [torch.zeros(b.size, dtype=b.dtype, device=b.device) for b in layout.buckets]
        views: dict[int, torch.Tensor] = {}
        for bucket, flat in zip(layout.buckets, self.flats, strict=True):
            for number, offset in zip(bucket.members, bucket.offsets, strict=True):
                views[number] = _view(flat, offset, layout.parts[number])
        self.views = [views[number] for number in range(len(layout.params))]
        self.mark = layout.mark_of(self.memory.bytes) if self.memory else torch.zeros(1, dtype=torch.uint8)
        self.bucket_of, self.sparse = layout.bucket_of, layout.sparse
        self.filled: list[bool] = []
        """Which views hold a gradient; the content of the others has no meaning."""
        self._versions: list[int] = []
        self.clear()

    def clear(self) -> None:
        """Mark all views as empty. The next gradients overwrite them."""
        self.filled = [False] * len(self.views)
        if self.mark[0]:
            self.mark.zero_()

    @property
    def is_modified(self) -> bool:
        """Whether a process has begun to write a sum here, so that it is no partial sum any more."""
        return bool(self.mark[0])

    def attach(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Set p.grad to the views that hold a gradient, and to None for the others."""
        self._versions = [version_of(flat) for flat in self.flats]
        for number, (p, view, filled) in enumerate(zip(params, self.views, self.filled, strict=True)):
            p.grad = view if filled and not (number in self.sparse or is_dtensor(p)) else None

    def assign_gradients(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Set p.grad to the views."""
        for p, view in zip(params, self.views, strict=True):
            p.grad = from_local_like(view, p)

    def fill(self, number: int, p: torch.Tensor) -> None:
        """Store the gradient of parameter `number`, which autograd has just accumulated."""
        self._versions[self.bucket_of[number]] += 1
        if p.grad is not self.views[number]:  # otherwise autograd has added to the view
            grad = coalesced(local_gradient(p))
            if grad.is_sparse:
                self.sparse.add(number)
            self._add(number, grad)
            p.grad = None if grad.is_sparse or is_dtensor(p) else self.views[number]

    def untouched(self, params: Sequence[torch.nn.Parameter]) -> bool:
        """Return whether only autograd has written to p.grad since `attach`."""
        return [version_of(flat) for flat in self.flats] == self._versions and all(
            p.grad is None or p.grad is view for p, view in zip(params, self.views, strict=True)
        )

    def merge(self, number: int, other: LooseGradient) -> None:
        """Add the gradient of parameter `number` from another copy, and remove it there."""
        grad = other.take(number)
        if grad is not None:
            self._add(number, grad)

    def take_over(self, other: FlatGradient) -> None:
        """Copy another gradient, which may have buckets of another size."""
        for number, filled in enumerate(other.filled):
            if filled:
                self.views[number].copy_(other.views[number])
        self.filled = list(other.filled)

    def add_from(self, other: FlatGradient) -> None:
        """Add another gradient."""
        for number, filled in enumerate(other.filled):
            if filled:
                self._add(number, other.views[number])

    def _add(self, number: int, grad: torch.Tensor) -> None:
        view = self.views[number]
        if self.filled[number]:
            view.add_(grad)
        else:
            torch.add(grad.to_dense(), 0.0, out=view)
            self.filled[number] = True

    def complete(self) -> None:
        """Set the views without a gradient to zero."""
        for number, filled in enumerate(self.filled):
            if not filled:
                self.views[number].zero_()
                self.filled[number] = True


class LooseGradient:
    """A copy of the gradient that is added to another one on this process: the tensors that autograd made."""

    def __init__(self, layout: BucketLayout) -> None:
        self.grads: list[torch.Tensor | None] = [None] * len(layout.params)
        self.sparse = layout.sparse
        self._versions = [0] * len(layout.params)

    def attach(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Set p.grad to the gradients that are here."""
        for number, (p, grad) in enumerate(zip(params, self.grads, strict=True)):
            p.grad = None if number in self.sparse or is_dtensor(p) else grad

    def fill(self, number: int, p: torch.Tensor) -> None:
        """Store the gradient of parameter `number`, which autograd has just accumulated."""
        held, grad = self.grads[number], coalesced(local_gradient(p))
        if grad.is_sparse:
            self.sparse.add(number)
        if held is None:
            held = self.grads[number] = grad.to_dense()
            self._versions[number] = version_of(held)
        else:
            if grad is not held:  # the script has called zero_grad in between
                held.add_(grad)
            self._versions[number] += 1
        if grad.is_sparse or is_dtensor(p):
            p.grad = None
        elif grad is not held:
            p.grad = held

    def untouched(self, params: Sequence[torch.nn.Parameter]) -> bool:
        """Return whether only autograd has written to p.grad since `attach`."""
        return all(
            p.grad is None or (p.grad is grad and version_of(grad) == version)
            for p, grad, version in zip(params, self.grads, self._versions, strict=True)
        )

    def merge(self, number: int, other: LooseGradient) -> None:
        """Add the gradient of parameter `number` from another copy, and remove it there."""
        grad = other.take(number)
        held = self.grads[number]
        if held is None:
            self.grads[number] = grad
        elif grad is not None:
            held.add_(grad)

    def take(self, number: int) -> torch.Tensor | None:
        """Remove the gradient of parameter `number` and return it."""
        grad, self.grads[number] = self.grads[number], None
        return grad


class FlatGradientPool:
    """Reuse the memory of flat gradients. One that is taken holds nothing."""

    def __init__(self, layout: BucketLayout, *, shared: bool) -> None:
        self.layout, self.shared = layout, shared
        self.free: list[FlatGradient] = []
        self.created = 0

    def take(self) -> FlatGradient:
        if not self.free:
            self.created += 1
            return FlatGradient(self.layout, shared=self.shared)
        copy = self.free.pop()
        copy.clear()
        return copy

    def give(self, copies: Iterable[FlatGradient]) -> None:
        self.free += copies


def local_gradient(p: torch.Tensor) -> torch.Tensor:
    """Return this process's part of p.grad, divided as the parameter is.

    Where the parts on the processes of the parameter's mesh are still terms of a sum, they are added up.
    """
    grad: Any = p.grad
    assert grad is not None
    if is_dtensor(p) and grad.placements != p.placements:  # type: ignore[attr-defined]
        grad = grad.redistribute(placements=p.placements)  # type: ignore[attr-defined]
    part: torch.Tensor = to_local(grad)
    return part


def coalesced(grad: torch.Tensor) -> torch.Tensor:
    """Sum the entries of a sparse gradient that belong to the same row: a row that occurs twice in a micro-batch, say.

    So the sum of one micro-batch is complete before it is added to others. torch would add every entry to the sum by
    itself, and the order of these additions would depend on which process holds the others.
    """
    return grad.coalesce() if grad.is_sparse else grad


def _view(flat: torch.Tensor, offset: int, p: torch.nn.Parameter) -> torch.Tensor:
    """Return part of `flat` with the shape of `p`, and with its strides where `p` is dense (channels_last, say).

    Autograd and the foreach optimizers are fastest when a gradient has the strides of its parameter.
    """
    dense = torch.empty_like(p, device="meta").stride()  # preserve_format: p's own strides if it is dense
    return flat.as_strided(p.shape, dense, flat.storage_offset() + offset)
