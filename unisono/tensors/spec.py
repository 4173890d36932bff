"""Dtype, shape and bytes of a tensor, in the form in which a message or a file states them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch


class TensorSpec(NamedTuple):
    """Dtype, shape and kind of device of a dense tensor: enough to make room for it.

    As JSON it is the list [dtype, shape, device].
    """

    dtype: str
    """Torch's name without the prefix: "float32"."""
    shape: tuple[int, ...]
    device: str = "cpu"
    """Type of the device on which the tensor is used. Bytes may travel or be stored elsewhere."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """Return the spec of a tensor."""
        return cls(dtype_name(tensor.dtype), tuple(tensor.shape), tensor.device.type)

    @classmethod
    def from_json(cls, item: Sequence[Any]) -> TensorSpec:
        """Return the spec that a JSON list states."""
        dtype, shape, *device = item
        return cls(dtype, tuple(shape), *device)

    @property
    def torch_dtype(self) -> torch.dtype:
        """Return the dtype as torch has it."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of the elements."""
        return prod(self.shape) * self.torch_dtype.itemsize

    def empty(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return an uninitialized tensor of this dtype and shape."""
        return torch.empty(self.shape, dtype=self.torch_dtype, device=device)


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype without the prefix: "float32"."""
    return str(dtype).removeprefix("torch.")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a dense tensor in their order, as uint8 [nbytes].

    It shares memory with the tensor if that is contiguous. Messages travel as bytes because no back end knows every
    dtype (gloo: bool, int16, float8).
    """
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    if flat.stride() != (1,):  # a single element may keep the stride of the tensor that it is cut from
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)
