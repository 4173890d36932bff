"""Several tensors in one row of bytes, which is sent or stored as a whole.

| tensor 0 | 0 | tensor 1           | tensor 2 | 0 |        each begins at a multiple of 16 bytes
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from unisono.tensors.spec import TensorSpec

ALIGNMENT = 16
"""Bytes. Every tensor begins at a multiple of it, because torch can view bytes as complex128 only there."""


class FlatTensors(NamedTuple):
    """Tensors of these specs, one after another in `data`, uint8 [n]."""

    specs: Sequence[TensorSpec]
    data: torch.Tensor

    @classmethod
    def empty(
        cls, specs: Sequence[TensorSpec], device: torch.device | str = "cpu", reuse: FlatTensors | None = None
    ) -> FlatTensors:
        """Return room for tensors of these specs.

        Args:
            specs: Dtypes and shapes, in order.
            device: Device of the memory.
            reuse: Tensors that are no longer needed. Their memory is taken if its size fits.
        """
        size = size_of(specs)
        if reuse is not None and len(reuse.data) == size:
            return cls(specs, reuse.data)
        return cls(specs, torch.empty(size, dtype=torch.uint8, device=device))

    @classmethod
    def copy_of(
        cls, tensors: Sequence[torch.Tensor], device: torch.device | str = "cpu", reuse: FlatTensors | None = None
    ) -> FlatTensors:
        """Return copies of these tensors; see `empty`."""
        flat = cls.empty([TensorSpec.of(tensor) for tensor in tensors], device, reuse)
        flat.fill(tensors)
        return flat

    def fill(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy these tensors into the row."""
        for view, tensor in zip(self.views(), tensors, strict=True):
            view.copy_(tensor.detach())

    def views(self) -> list[torch.Tensor]:
        """Return the tensors. They share the memory of the row."""
        found, begin = [], 0
        for spec in self.specs:
            size = spec.nbytes
            found.append(self.data[begin : begin + size].view(spec.torch_dtype).view(spec.shape))
            begin += aligned(size)
        return found


def size_of(specs: Iterable[TensorSpec]) -> int:
    """Return the length in bytes of a row of such tensors."""
    return sum(aligned(spec.nbytes) for spec in specs)


def aligned(size: int) -> int:
    """Return the smallest multiple of ALIGNMENT that is not below `size`."""
    return -(-size // ALIGNMENT) * ALIGNMENT
