"""Divide gradients, and check that they are finite, in as few passes over memory as their device allows.

    bytes per float32                     torch    one Triton kernel
    divide, and check                      12             8
    add two, divide, and check             24            12

On the CPU the passes are over blocks that stay in the cache, so memory is read and written once there as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from unisono.exchange.buckets import finite
from unisono.exchange.kernels.device_kernels import kernels_for


def divide_(flats: Iterable[torch.Tensor], weight: float) -> bool:
    """Divide in place, and return whether all elements are finite then. Waits for an accelerator once."""
    flats = list(flats)
    divisors: dict[torch.device, torch.Tensor] = {}
    found = []
    for flat in flats:
        divisor = divisors.get(flat.device)
        if divisor is None:
            # filled on the device: a tensor of a Python number would be copied there, and waited for
            divisor = divisors[flat.device] = torch.full((), weight, dtype=torch.float64, device=flat.device)
        found.append(kernels_for(flat).divide_(flat, divisor))
    return are_finite(found, flats)


def are_finite(found: Sequence[torch.Tensor], tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether all elements of some tensors are finite.

    Args:
        found: what kernels have returned for them. If all are true, the tensors are not read.
        tensors: the tensors.
    """
    if len({one.device for one in found}) == 1:
        found = [torch.stack(tuple(found)).all()]
    return all(map(bool, found)) or all(map(finite, tensors))  # a sum of finite elements may overflow
