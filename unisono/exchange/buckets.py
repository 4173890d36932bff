"""Gradients as a few flat buffers: the layout of parameters in buckets, and who is ready when.

Parameters are laid out in the order in which backward tends to finish them (the reverse of registration), each kind of
gradient (dtype, device) in buffers of its own. A buffer is one bucket's worth of one gradient copy; `p.grad` is a view
into it, so autograd adds straight into what will travel. Of a parameter that lies over several processes (torch's
DTensor, under tensor parallel) it is the part that this process holds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from unisono.distributed.process_group import from_local_like, is_dtensor, to_local
from unisono.distributed.shared_memory import SharedMemory
from unisono.errors import LoopError
from unisono.exchange.base import Exchange

BUCKET_BYTES = 25 * 2**20
"""Large enough to amortise a collective's latency, small enough to overlap; DistributedDataParallel's default."""

BLOCK = 2**16
"""Elements that are summed, divided and looked at in one go: 256 kB of float32, of which several fit into a cache."""

ALIGN = 16
"""Every parameter starts at a multiple of this many elements: a cache line of float32, and whole SIMD registers."""

LINE = 64
"""Bytes of a cache line, where a bucket starts in memory that holds several."""


@dataclass
class Bucket:
    """Some parameters side by side: `members` are their numbers, `offsets` where each starts, in elements."""

    dtype: torch.dtype
    device: torch.device
    members: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    size: int = 0

    def append(self, number: int, elements: int) -> None:
        self.members.append(number)
        self.offsets.append(self.size)
        self.size += -(-elements // ALIGN) * ALIGN


class BucketLayout:
    """Which parameter lies where. Buckets are padded to a multiple of `size` chunks; the padding stays zero.

    holders  of each parameter, a number: only those of one number share a bucket
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        size: int,
        bucket_bytes: int = BUCKET_BYTES,
        holders: Sequence[int] = (),
    ) -> None:
        self.params = params
        self.parts = [to_local(p.detach()) for p in params]
        """What this process holds of each."""
        self.buckets: list[Bucket] = []
        open_buckets: dict[tuple[torch.dtype, torch.device, int], Bucket] = {}
        for number in reversed(range(len(params))):
            p, dtype = self.parts[number], params[number].dtype
            kind = dtype, p.device, holders[number] if holders else 0
            bucket = open_buckets.get(kind)
            if bucket is None or (bucket.size + p.numel()) * dtype.itemsize > bucket_bytes:
                bucket = open_buckets[kind] = Bucket(dtype, p.device)
                self.buckets.append(bucket)
            bucket.append(number, p.numel())
        for bucket in self.buckets:
            bucket.size = max(1, -(-bucket.size // (size * ALIGN))) * size * ALIGN  # a parameter may have no elements
        self.bucket_of = {number: b for b, bucket in enumerate(self.buckets) for number in bucket.members}
        self.sparse: set[int] = set()
        """Parameters whose gradient has arrived as a sparse tensor (`nn.EmbeddingBag(sparse=True)`)."""
        ends = itertools.accumulate(-(-b.size * b.dtype.itemsize // LINE) * LINE for b in self.buckets)
        self._ends = [0, *ends]  # in bytes, when all buckets lie one after the other

    @property
    def bytes(self) -> int:
        """What `cut` takes."""
        return self._ends[-1]

    @property
    def bytes_shared(self) -> int:
        """The same with a line behind them, for the mark that says that somebody has begun to add up there."""
        return self._ends[-1] + LINE

    def mark_of(self, memory: torch.Tensor) -> torch.Tensor:
        """The mark, one byte, of memory that is `bytes_shared` long."""
        return memory[self._ends[-1] : self._ends[-1] + 1]

    @property
    def bytes_of_all(self) -> int:
        """What one gradient takes when it travels."""
        return sum(b.size * b.dtype.itemsize for b in self.buckets)

    def cut(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """A flat buffer for each bucket out of one piece of memory, `bytes` long."""
        return [  # .data: each counts its own versions
            memory[start : start + b.size * b.dtype.itemsize].view(b.dtype).data
            for start, b in zip(self._ends, self.buckets, strict=False)
        ]


class FlatGradient:
    """One copy of the gradient that will travel: a flat buffer for each bucket, and a view for each parameter.

    Autograd writes a first gradient wherever it likes; `fill` brings it here while it is still in the processor's
    cache. That is cheaper than zeroing the copy beforehand and having autograd add into it, and has the same bits.
    It is stored as 0 + g, which is g, except that -0 becomes +0. No sum is ever -0 then, so an absent gradient may
    count as zeros.

    shared  in memory that neighbours can open (then the buckets are the CPU's)
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
        """Which views hold a gradient; the content of the others means nothing."""
        self._versions: list[int] = []
        self.clear()

    def clear(self) -> None:
        """Forget what is here. Costs nothing: the first gradient that comes overwrites it."""
        self.filled = [False] * len(self.views)
        if self.mark[0]:
            self.mark.zero_()

    @property
    def is_modified(self) -> bool:
        """Has anybody begun to add up in it, so that it is no partial sum any more?"""
        return bool(self.mark[0])

    def place(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Make p.grad what backward should add to: the views that hold a gradient, and nothing for the others."""
        self._versions = [flat._version for flat in self.flats]
        for number, (p, view, filled) in enumerate(zip(params, self.views, self.filled, strict=True)):
            p.grad = view if filled and not (number in self.sparse or is_dtensor(p)) else None

    def assign_gradients(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Make p.grad what is here."""
        for p, view in zip(params, self.views, strict=True):
            p.grad = from_local_like(view, p)

    def fill(self, number: int, p: torch.Tensor) -> None:
        """A gradient of parameter `number` has been accumulated: see that it is here."""
        self._versions[self.bucket_of[number]] += 1
        if p.grad is not self.views[number]:  # otherwise autograd added to what was here
            grad = unique(part_of_gradient(p))
            if grad.is_sparse:
                self.sparse.add(number)
            self._add(number, grad)
            p.grad = None if grad.is_sparse or is_dtensor(p) else self.views[number]

    def untouched(self, params: Sequence[torch.nn.Parameter]) -> bool:
        """Has nobody but autograd written to p.grad since `place`, nor replaced it?"""
        return [flat._version for flat in self.flats] == self._versions and all(
            p.grad is None or p.grad is view for p, view in zip(params, self.views, strict=True)
        )

    def merge(self, number: int, other: LooseGradient) -> None:
        """Add the other's gradient of parameter `number`, which is gone from there then."""
        grad = other.take(number)
        if grad is not None:
            self._add(number, grad)

    def take_over(self, other: FlatGradient) -> None:
        """Hold what another copy holds, which may lie in buckets of another size."""
        for number, filled in enumerate(other.filled):
            if filled:
                self.views[number].copy_(other.views[number])
        self.filled = list(other.filled)

    def add_from(self, other: FlatGradient) -> None:
        """Add all that is in another copy, which is free then."""
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
        """What has no gradient counts as zeros."""
        for number, filled in enumerate(self.filled):
            if not filled:
                self.views[number].zero_()
                self.filled[number] = True


class LooseGradient:
    """One copy of the gradient that will be added to another one here: the tensors that autograd made, as they are."""

    def __init__(self, layout: BucketLayout) -> None:
        self.grads: list[torch.Tensor | None] = [None] * len(layout.params)
        self.sparse = layout.sparse
        self._versions = [0] * len(layout.params)

    def place(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Make p.grad what backward should add to."""
        for number, (p, grad) in enumerate(zip(params, self.grads, strict=True)):
            p.grad = None if number in self.sparse or is_dtensor(p) else grad

    def fill(self, number: int, p: torch.Tensor) -> None:
        """A gradient of parameter `number` has been accumulated: see that it is here."""
        held, grad = self.grads[number], unique(part_of_gradient(p))
        if grad.is_sparse:
            self.sparse.add(number)
        if held is None:
            held = self.grads[number] = grad.to_dense()
            self._versions[number] = held._version
        else:
            if grad is not held:  # somebody's zero_grad came between
                held.add_(grad)
            self._versions[number] += 1
        if grad.is_sparse or is_dtensor(p):
            p.grad = None
        elif grad is not held:
            p.grad = held

    def untouched(self, params: Sequence[torch.nn.Parameter]) -> bool:
        """Has nobody but autograd written to p.grad since `place`, nor replaced it?"""
        return all(
            p.grad is None or (p.grad is grad and grad._version == version)
            for p, grad, version in zip(params, self.grads, self._versions, strict=True)
        )

    def merge(self, number: int, other: LooseGradient) -> None:
        """Add the other's gradient of parameter `number`, which is gone from there then."""
        grad = other.take(number)
        held = self.grads[number]
        if held is None:
            self.grads[number] = grad
        elif grad is not None:
            held.add_(grad)

    def take(self, number: int) -> torch.Tensor | None:
        grad, self.grads[number] = self.grads[number], None
        return grad


def part_of_gradient(p: torch.Tensor) -> torch.Tensor:
    """What this process holds of a gradient, lying as its parameter lies: where parts of it are still to be added up
    over the parameter's own processes, they are."""
    grad: Any = p.grad
    assert grad is not None
    if is_dtensor(p) and grad.placements != p.placements:  # type: ignore[attr-defined]
        grad = grad.redistribute(placements=p.placements)  # type: ignore[attr-defined]
    part: torch.Tensor = to_local(grad)
    return part


def unique(grad: torch.Tensor) -> torch.Tensor:
    """Sum what a sparse gradient holds several times for the same row: a row that occurs twice in a micro-batch, say.

    So the sum of one micro-batch is complete before it is added to others. torch would add every occurrence to the
    sum by itself, and the order of these additions would depend on which process holds the others.
    """
    return grad.coalesce() if grad.is_sparse else grad


def blocks(tensor: torch.Tensor) -> Iterator[slice]:
    """A long row cut into stretches: on a processor as long as a cache holds, so that what is done to an element can
    be done at once; elsewhere the whole."""
    step = BLOCK if tensor.device.type == "cpu" else max(len(tensor), 1)
    for start in range(0, len(tensor), step):
        yield slice(start, start + step)


def divide_(flat: torch.Tensor, weight: float) -> bool:
    """Divide in place. Are all elements finite then?"""
    # a tensor: elsewhere than on a processor torch divides by a number by multiplying with its inverse
    divisor = flat.new_tensor(weight, dtype=torch.float64)
    found = [finite(flat[block].div_(divisor)) for block in blocks(flat)]  # all: every block is to be divided
    return all(found)


def finite(tensor: torch.Tensor) -> bool:
    """Whether every element is finite."""
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    # only finite terms have a finite sum, and a sum is the quickest read there is; one that overflows is looked into
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def _view(flat: torch.Tensor, offset: int, p: torch.nn.Parameter) -> torch.Tensor:
    """Part of `flat` with the shape of `p`, and its strides where `p` fills its memory (channels_last, say).

    Autograd and the foreach optimizers are fastest when a gradient lies in memory as its parameter does.
    """
    dense = torch.empty_like(p, device="meta").stride()  # preserve_format: p's own strides if it is dense
    return flat.as_strided(p.shape, dense, flat.storage_offset() + offset)


class FlatGradientPool:
    """Copies that are not in use. One that is taken holds nothing."""

    def __init__(self, layout: BucketLayout, *, shared: bool) -> None:
        self.layout, self.shared = layout, shared
        self.free: list[FlatGradient] = []
        self.made = 0

    def take(self) -> FlatGradient:
        if not self.free:
            self.made += 1
            return FlatGradient(self.layout, shared=self.shared)
        copy = self.free.pop()
        copy.clear()
        return copy

    def give(self, copies: Iterable[FlatGradient]) -> None:
        self.free += copies


def gradient_modified_error() -> LoopError:
    return LoopError(
        "The gradient was changed between two micro-batches.",
        "There p.grad holds whatever this process has added up so far: another number of processes would change "
        "another sum. (Clipping, noise, zero_grad(set_to_none=False), a hook that runs after accumulation.)",
        "change p.grad after `for batch in step:`, where it is the mean gradient; clip with "
        "step.update(optimizer, clip=1.0).",
    )


class BucketReadiness:
    """Knows which parameters backward has finished: calls `complete(number)` for each, where that matters, and
    `launch(bucket)` as soon as a bucket is complete, in the last micro-batch of all.

    It counts how often each parameter's gradient is accumulated during one backward. Usually once; recomputation with
    a nested backward makes it more. The most ever seen is what it waits for, so the first micro-batch of a run is only
    watched. Buckets are launched in their fixed order, since every process must post the same sequence.
    """

    def __init__(
        self, layout: BucketLayout, launch: Callable[[int], None], complete: Callable[[int], None] = lambda number: None
    ) -> None:
        self.layout = layout
        self.launch, self.complete = launch, complete
        self.used = [False] * len(layout.params)
        self.touched = False
        self.expected = [0] * len(layout.params)
        self.fired = [0] * len(layout.params)
        self.next = 0
        self.into: FlatGradient | LooseGradient | None = None
        self._known = self._tell = self._sends = self._last = False
        self._missing: list[int] = []
        self._handles = [
            p.register_post_accumulate_grad_hook(self._on_gradient(number)) for number, p in enumerate(layout.params)
        ]

    def _on_gradient(self, number: int) -> Callable[[torch.Tensor], None]:
        bucket = self.layout.bucket_of[number]

        def fire(p: torch.Tensor) -> None:
            if self.into is None:  # another exchange's turn: the parameter is in several
                return
            self.into.fill(number, p)
            self.used[number] = True
            self.fired[number] += 1
            if not (self._tell or self._sends):
                return
            if self.fired[number] > self.expected[number] > 0 and (self._tell or bucket < self.next):
                self.refuse_varying(number)
            if self.fired[number] != self.expected[number]:
                return
            if self._tell:
                self.complete(number)
            if self._sends:
                self._missing[bucket] -= 1
                while self.next < len(self._missing) and self._missing[self.next] == 0:
                    self.next += 1
                    self.launch(self.next - 1)

        return fire

    def refuse_varying(self, number: int) -> None:
        """A backward brought a gradient more often than any before it, when it had been added to others already."""
        shape = tuple(self.layout.params[number].shape)
        raise LoopError(
            f"A parameter of shape {shape} received another gradient when its sum was under way.",
            f"It was accumulated {self.fired[number]} times in this backward, never more than "
            f"{self.expected[number]} times before: the same layer is recomputed a varying number of times.",
            "use torch.utils.checkpoint with use_reentrant=False, which accumulates each parameter once.",
        )

    def begin(self) -> None:
        """A step begins: nothing is used or touched, nothing is launched.

        In the first one nothing leaves before its last backward is over: what it tells of a model, every process says
        by itself then, and none only that another one is gone.
        """
        self._known = any(self.expected)
        self.used = [False] * len(self.used)
        self.touched = False
        self.next = 0

    def enter(self, into: FlatGradient | LooseGradient, *, tell: bool, last: bool, launch: bool) -> None:
        """A micro-batch begins, gathered in `into`. Does it matter when parameters are complete? Is it the last one?
        Do its buckets leave as soon as they are complete?"""
        self.into = into
        into.place(self.layout.params)
        self.fired = [0] * len(self.fired)
        self._tell, self._sends, self._last = tell and any(self.expected), launch and self._known, last
        if self._sends:
            self._missing = [len(bucket.members) for bucket in self.layout.buckets]

    def leave(self) -> None:
        if self.into is not None and not self.into.untouched(self.layout.params):
            if not self._last:
                raise gradient_modified_error()
            self.touched = True
        self.into, self._tell, self._sends, self._last = None, False, False, False
        self.expected = [max(pair) for pair in zip(self.expected, self.fired, strict=True)]

    def launch_rest(self) -> None:
        """No more backward will come in this step: what has not been launched is launched now."""
        while self.next < len(self.layout.buckets):
            self.next += 1
            self.launch(self.next - 1)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


class BucketedExchange(Exchange):
    """Base class of an exchange that collects gradients in buckets."""

    ready: BucketReadiness

    @property
    def used(self) -> Sequence[bool]:
        return self.ready.used

    @property
    def touched(self) -> bool:
        return self.ready.touched

    def close(self) -> None:
        self.ready.close()
        self.zero()
