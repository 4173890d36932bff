"""The kernels of an exchange in torch's operations, for any device. They define the bits.

On the CPU they work on blocks that stay in the cache, so memory is read and written once. On other devices each
operation is a pass over memory; triton_kernels.py has the same kernels in one pass each, for CUDA.
"""

from __future__ import annotations

import torch

from unisono.exchange.buckets import blocks


def divide_(flat: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    """Divide in place.

    Args:
        flat: the numbers, [n].
        divisor: one element. (On accelerators torch divides by a Python number by multiplying with its inverse.)

    Returns:
        Whether the sum of the result is finite, as a tensor. Only finite terms have a finite sum.
    """
    found = [torch.isfinite(flat[block].div_(divisor).sum()) for block in blocks(flat)]
    return found[0] if len(found) == 1 else torch.stack(found or [torch.isfinite(flat.sum())]).all()


def add_and_divide(a: torch.Tensor, b: torch.Tensor, divisor: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write (a + b) / divisor to `out`, which may be `a` or `b`; all are [n]. Return what `divide_` returns."""
    return torch.isfinite(torch.add(a, b, out=out).div_(divisor).sum())


def encode(values: torch.Tensor, largest: float, bits: int) -> torch.Tensor:
    """Encode blocks that have a scale each.

    Args:
        values: float32 [blocks, length].
        largest: the code of a block's largest element.
        bits: 4 or 8 for integers, 16 for float16.

    Returns:
        uint8 [blocks, 4 + length * bits / 8]: the scale as float32, then the codes.
    """
    scale = values.abs().amax(1, keepdim=True)
    scale.div_(torch.full_like(scale[:1], largest))  # see divide_
    scale.masked_fill_(scale == 0, 1.0)
    codes = values / scale
    if bits == 16:
        stored = codes.half().view(torch.uint8)
    else:
        stored = codes.round_().clamp_(-largest, largest).to(torch.int8)
        stored = _pack(stored) if bits == 4 else stored.view(torch.uint8)
    return torch.cat([scale.view(torch.uint8), stored], 1)


def decode(encoded: torch.Tensor, bits: int) -> torch.Tensor:
    """Decode what `encode` returned to float32 [blocks, length]."""
    scale, stored = encoded[:, :4].contiguous().view(torch.float32), encoded[:, 4:].contiguous()
    codes = _unpack(stored) if bits == 4 else stored.view(torch.int8 if bits == 8 else torch.float16)
    return codes.float().mul_(scale)


def _pack(codes: torch.Tensor) -> torch.Tensor:
    """Pack int8 codes from -7 to 7 in pairs, the first in the lower half of a byte: [blocks, n] -> [blocks, n / 2]."""
    pairs = (codes + 8).view(torch.uint8).view(len(codes), -1, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def _unpack(packed: torch.Tensor) -> torch.Tensor:
    pairs = torch.stack([packed & 15, packed >> 4], dim=2)
    return pairs.view(len(packed), -1).view(torch.int8) - 8
