"""Accumulate gradients: copies of a gradient to which autograd and other virtual ranks add.

On the CPU, a micro-batch's gradient is written or added to a copy as soon as autograd has accumulated it (`fill`), and
a copy of another virtual rank is added to it parameter by parameter (`merge`), while it is in the processor's cache. On
an accelerator, launching a kernel takes longer than most of these additions. So the gradients of a bucket wait until
all of them are there, and one kernel stores or adds them together (BucketLayout.batched).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from unisono.distributed.process_group import from_local_like, is_dtensor, to_local
from unisono.distributed.shared_memory import SharedMemory
from unisono.exchange.buckets import BucketLayout, version_of, versions_of


class PendingGradient(NamedTuple):
    """A gradient that autograd has accumulated, and that waits for the others of its bucket."""

    p: torch.Tensor
    grad: torch.Tensor
    version: int


class GradientMemory:
    """Give each gradient memory of its own.

    Autograd lets p.grad of several parameters share memory, for example after a.view(2, 2) + b.view(2, 2). Adding to
    one would change the other (torch does so: its p.grad is wrong after a second backward).
    """

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}  # the parameter whose gradient is in a storage
        self._storages: dict[int, int] = {}  # the storage of a parameter's gradient

    def claim(self, number: int, grad: torch.Tensor) -> torch.Tensor:
        """Return the gradient of parameter `number`, or a copy if that of another parameter shares its storage."""
        storage = storage_of(grad)
        if self._holders.setdefault(storage, number) != number and storage:
            return grad.clone()
        self._storages[number] = storage
        return grad

    def release(self, number: int) -> None:
        """Forget the gradient of parameter `number`, which is not kept any more."""
        storage = self._storages.pop(number, 0)
        if storage:
            self._holders.pop(storage, None)

    def clear(self) -> None:
        """Forget all gradients."""
        self._holders.clear()
        self._storages.clear()


def storage_of(grad: torch.Tensor) -> int:
    """Return the address of a tensor's storage; 0 if there is none."""
    if type(grad) is not torch.Tensor or grad.layout is not torch.strided:
        return 0
    return grad.untyped_storage().data_ptr() if grad.storage_offset() else grad.data_ptr()  # the second one is faster


def may_share_storage(grads: Sequence[torch.Tensor]) -> bool:
    """Return whether two gradients may share a storage. The usual answer, False, takes 0.2 microseconds a gradient."""
    try:
        addresses = set(map(torch.Tensor.data_ptr, grads))
    except (RuntimeError, NotImplementedError):  # a sparse one has no address
        return True
    return len(addresses) < len(grads) or any(map(torch.Tensor.storage_offset, grads))


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
        self._batched, self._members = layout.batched, [b.members for b in layout.buckets]
        self._pending: list[dict[int, PendingGradient]] = [{} for _ in layout.buckets]
        self._versions: list[int] = []
        self._is_touched = False
        self._memory = GradientMemory()
        self.clear()

    def clear(self) -> None:
        """Mark all views as empty. The next gradients overwrite them."""
        self.filled = [False] * len(self.views)
        for pending in self._pending:
            pending.clear()
        self._memory.clear()
        if self.mark[0]:
            self.mark.zero_()

    @property
    def is_modified(self) -> bool:
        """Whether a process has begun to write a sum here, so that it is no partial sum any more."""
        return bool(self.mark[0])

    def attach(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Set p.grad to the views that hold a gradient, and to None for the others."""
        self._versions, self._is_touched = versions_of(self.flats), False
        for number, (p, view, filled) in enumerate(zip(params, self.views, self.filled, strict=True)):
            p.grad = view if filled and not (number in self.sparse or is_dtensor(p)) else None

    def assign_gradients(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Set p.grad to the views."""
        for p, view in zip(params, self.views, strict=True):
            p.grad = from_local_like(view, p)

    def fill(self, number: int, p: torch.Tensor) -> None:
        """Store the gradient of parameter `number`, which autograd has just accumulated."""
        bucket = self.bucket_of[number]
        if p.grad is self.views[number]:  # autograd has added to the view
            self._versions[bucket] += 1
            return
        grad = coalesced(local_gradient(p))
        if grad.is_sparse:
            self.sparse.add(number)
        before = self._pending[bucket].get(number)
        if before is not None and before.grad is not grad:  # the script has removed that one from p.grad in between
            p.grad = None
            self.flush(bucket)
        if self._batched[bucket] and grad is p.grad and not self.filled[number] and not grad.is_sparse:
            self._wait(bucket, number, p)
            return
        self._versions[bucket] += 1
        self._add(number, grad)
        p.grad = None if grad.is_sparse or is_dtensor(p) else self.views[number]

    def _wait(self, bucket: int, number: int, p: torch.Tensor) -> None:
        """Let a gradient wait for the others of its bucket. Until then it is p.grad."""
        pending, grad = self._pending[bucket], p.grad
        assert grad is not None
        before = pending.get(number)
        if before is not None:  # accumulated once more in the same backward
            self._is_touched |= version_of(grad) != before.version + 1
        else:
            p.grad = grad = self._memory.claim(number, grad)
        pending[number] = PendingGradient(p, grad, version_of(grad))
        if len(pending) == len(self._members[bucket]):
            self.flush(bucket)

    def flush(self, bucket: int) -> None:
        """Store the gradients of a bucket that wait for the others."""
        pending = self._pending[bucket]
        if not pending:
            return
        self._is_touched |= version_of(self.flats[bucket]) != self._versions[bucket]
        for p, grad, version in pending.values():
            self._is_touched |= not (p.grad is None or p.grad is grad) or version_of(grad) != version
        self._store(bucket, {number: grad for number, (_, grad, _) in pending.items()})
        for number, (p, *_) in pending.items():
            if p.grad is not None:
                p.grad = self.views[number]
            self._memory.release(number)
        self._versions[bucket] = version_of(self.flats[bucket])
        pending.clear()

    def flush_all(self) -> None:
        """Store all gradients that wait for others."""
        for bucket in range(len(self._pending)):
            self.flush(bucket)

    def untouched(self, params: Sequence[torch.nn.Parameter]) -> bool:
        """Return whether only autograd has written to p.grad since `attach`. No gradient may wait (`flush_all`)."""
        return (
            not self._is_touched
            and versions_of(self.flats) == self._versions
            and all(p.grad is None or p.grad is view for p, view in zip(params, self.views, strict=True))
        )

    def merge(self, numbers: Iterable[int], other: LooseGradient) -> None:
        """Add the gradients of some parameters from another copy, and remove them there."""
        of_buckets: dict[int, dict[int, torch.Tensor]] = {}
        for number in numbers:
            grad = other.take(number)
            if grad is None:
                continue
            if self._batched[bucket := self.bucket_of[number]]:
                of_buckets.setdefault(bucket, {})[number] = grad
            else:
                self._add(number, grad)
        for bucket, grads in of_buckets.items():
            filled = [number for number in grads if self.filled[number]]
            if filled:
                torch._foreach_add_([self.views[n] for n in filled], [grads.pop(n) for n in filled])
            self._store(bucket, grads)

    def take_over(self, other: FlatGradient) -> None:
        """Copy another gradient, which may have buckets of another size."""
        for number, filled in enumerate(other.filled):
            if filled:
                self.views[number].copy_(other.views[number])
        self.filled = list(other.filled)

    def add_from(self, other: FlatGradient) -> None:
        """Add another gradient, which has buckets of the same size."""
        for members, flat, more in zip(self._members, self.flats, other.flats, strict=True):
            if all(self.filled[number] and other.filled[number] for number in members):
                flat.add_(more)
                continue
            for number in members:
                if other.filled[number]:
                    self._add(number, other.views[number])

    def _store(self, bucket: int, grads: Mapping[int, torch.Tensor]) -> None:
        """Store 0 + g in the views of some parameters of a bucket, which hold nothing, with two kernels."""
        views = [self.views[number] for number in grads]
        if len(grads) == len(self._members[bucket]):
            self.flats[bucket].zero_()
        elif views:
            torch._foreach_zero_(views)
        if views:
            torch._foreach_add_(views, list(grads.values()))
        for number in grads:
            self.filled[number] = True

    def _add(self, number: int, grad: torch.Tensor) -> None:
        view = self.views[number]
        if self.filled[number]:
            view.add_(grad)
        else:
            torch.add(grad.to_dense(), 0.0, out=view)
            self.filled[number] = True

    def complete(self) -> None:
        """Set the views without a gradient to zero."""
        missing = [view for view, filled in zip(self.views, self.filled, strict=True) if not filled]
        if missing:
            torch._foreach_zero_(missing)
            self.filled = [True] * len(self.views)


class LooseGradient:
    """A copy of the gradient that is added to another one on this process: the tensors that autograd made."""

    def __init__(self, layout: BucketLayout) -> None:
        self.grads: list[torch.Tensor | None] = [None] * len(layout.params)
        self.sparse = layout.sparse
        self._memory = GradientMemory()
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
            held = self.grads[number] = self._memory.claim(number, grad.to_dense())
            self._versions[number] = version_of(held)
        else:
            if grad is not held:  # the script has called zero_grad in between
                held.add_(grad)
            self._versions[number] += 1
        if grad.is_sparse or is_dtensor(p):
            p.grad = None
        elif grad is not held:
            p.grad = held

    def flush(self, bucket: int) -> None:
        """Do nothing: no gradient waits here."""

    def flush_all(self) -> None:
        """Do nothing: no gradient waits here."""

    def untouched(self, params: Sequence[torch.nn.Parameter]) -> bool:
        """Return whether only autograd has written to p.grad since `attach`."""
        return all(
            p.grad is None or (p.grad is grad and version_of(grad) == version)
            for p, grad, version in zip(params, self.grads, self._versions, strict=True)
        )

    def merge(self, numbers: Iterable[int], other: LooseGradient) -> None:
        """Add the gradients of some parameters from another copy, and remove them there."""
        sums: list[torch.Tensor] = []
        terms: list[torch.Tensor] = []
        for number in numbers:
            grad, held = other.take(number), self.grads[number]
            if held is None:
                self.grads[number] = grad
            elif grad is not None:
                sums.append(held)
                terms.append(grad)
        if len(sums) == 1:
            sums[0].add_(terms[0])
        elif sums:
            torch._foreach_add_(sums, terms)

    def take(self, number: int) -> torch.Tensor | None:
        """Remove the gradient of parameter `number` and return it."""
        grad, self.grads[number] = self.grads[number], None
        self._memory.release(number)
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
