"""Gradients in a few flat buffers: the layout of parameters in buckets. gradient_accumulation.py fills them.

Parameters are laid out in the order in which backward tends to finish them, the reverse of registration. Gradients of
different dtype or device have buckets of their own. `p.grad` is a view into a bucket's buffer, so autograd accumulates
directly into the memory that is sent. Of a DTensor parameter (under tensor parallelism), the buckets hold the part of
this process.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import torch

from unisono.distributed.process_group import to_local

BUCKET_BYTES = 25 * 2**20
"""Large enough to amortize a collective's latency, small enough to overlap; DistributedDataParallel's default."""

BLOCK = 2**16
"""Elements that are summed, divided and checked at once: 256 kB of float32, of which several fit into a cache."""

ALIGN = 16
"""Every parameter starts at a multiple of this many elements: a cache line of float32, and whole SIMD registers."""

LINE = 64
"""Bytes of a cache line; each bucket starts at a multiple of it in memory that holds several."""


@dataclass
class Bucket:
    """Parameters that share a flat buffer.

    Attributes:
        dtype: The dtype of the buffer.
        device: Its device.
        members: The numbers of the parameters.
        offsets: Where each of them starts, in elements.
        size: The number of elements, with padding.
    """

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
    """Assign parameters to buckets. Buckets are padded to a multiple of `size` chunks; the padding stays zero.

    Args:
        params: The parameters.
        size: The number of chunks into which each bucket is divided.
        bucket_bytes: The most bytes of a bucket that has more than one parameter.
        holders: A number for each parameter; only parameters with the same number share a bucket.
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
        """The part of each parameter that this process holds."""
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
        self.batched = [bucket.device.type != "cpu" for bucket in self.buckets]
        """Whether the gradients of a bucket are stored and added together, with few kernels."""
        self.bucket_of = {number: b for b, bucket in enumerate(self.buckets) for number in bucket.members}
        self.sparse: set[int] = set()
        """Parameters whose gradient has arrived as a sparse tensor (`nn.EmbeddingBag(sparse=True)`)."""
        ends = itertools.accumulate(-(-b.size * b.dtype.itemsize // LINE) * LINE for b in self.buckets)
        self._ends = [0, *ends]  # in bytes, when the buckets follow each other in one piece of memory

    @property
    def bytes_shared(self) -> int:
        """Bytes of a gradient in one piece of shared memory: all buckets, and a cache line for the mark."""
        return self._ends[-1] + LINE

    def mark_of(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the mark in shared memory: one byte, set when a process begins to write the sum there."""
        return memory[self._ends[-1] : self._ends[-1] + 1]

    @property
    def bytes_of_all(self) -> int:
        """Bytes of one gradient in messages."""
        return sum(b.size * b.dtype.itemsize for b in self.buckets)

    def cut(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Cut one piece of memory into a flat buffer for each bucket."""
        return [  # .data gives each its own version counter
            memory[start : start + b.size * b.dtype.itemsize].view(b.dtype).data
            for start, b in zip(self._ends, self.buckets, strict=False)
        ]


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor has been written to in place.

    Autograd counts it to refuse wrong gradients; torch has no public name for it
    (https://docs.pytorch.org/docs/stable/notes/autograd.html#in-place-correctness-checks).
    """
    return tensor._version


def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return `version_of` each tensor, in a quarter of the time of as many calls."""
    return list(map(_VERSION, tensors))


_VERSION = attrgetter("_version")


def blocks(flat: torch.Tensor) -> Iterator[slice]:
    """Cut a flat tensor into blocks that fit into a processor's cache. On other devices it is one block."""
    step = BLOCK if flat.device.type == "cpu" else max(len(flat), 1)
    for start in range(0, len(flat), step):
        yield slice(start, start + step)


def finite(tensor: torch.Tensor) -> bool:
    """Return whether every element is finite."""
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    # only finite terms have a finite sum, and a sum is the fastest way to read; if it overflows, look at the elements
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())
