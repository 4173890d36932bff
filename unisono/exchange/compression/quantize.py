"""Rows of numbers in 8 or 4 bits each, for a thin line: every block of 256 has a scale of its own.

    256 numbers  ->  scale = the largest of them / 127 (8 bits) or / 7 (4 bits), as float32
                     each as the nearest whole multiple of the scale                          264 or 132 bytes

So no number is off by more than half a scale: 1/254 or 1/14 of the largest in its block. The nearest, and no dice: the
same row always has the same bytes. What is lost is not lost for good: whoever sends keeps it, and adds it to what it
sends next (error feedback; Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014).

Streaming DiLoCo (Douillard et al., arXiv 2501.18512) sends its outer gradients in 4 bits, as floating-point numbers of
three bits of exponent. Whole multiples of a block's scale are what a processor without such numbers makes quickly.
"""

from __future__ import annotations

import torch

BLOCK = 256
"""Numbers that share a scale: its 4 bytes are an eighth of a bit for each of them."""

LEVELS = {8: 127, 4: 7}
"""The largest multiple of a scale, by bits."""


def encode(row: torch.Tensor, bits: int) -> torch.Tensor:
    """A row of whole blocks as bytes, uint8 [n]: first all scales, then all multiples. With 32 bits, as it is."""
    if bits not in LEVELS:
        return row.contiguous().view(torch.uint8)
    most = LEVELS[bits]
    blocks = row.float().view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1, keepdim=True) / most
    whole = (blocks / torch.where(scales > 0, scales, 1.0)).round_().clamp_(-most, most).to(torch.int8)
    if bits == 4:  # two in a byte, the first in the lower half; +8 makes 1 to 15 of -7 to 7
        pairs = (whole + 8).view(torch.uint8).view(-1, 2)
        codes = pairs[:, 0] | (pairs[:, 1] << 4)
    else:
        codes = whole.view(torch.uint8).view(-1)
    return torch.cat([scales.view(-1).view(torch.uint8), codes])


def decode(code: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """The row that these bytes stand for."""
    if bits not in LEVELS:
        return code.view(dtype)
    count = len(code) // (4 + BLOCK * bits // 8)
    scales, codes = code[: 4 * count].view(torch.float32).view(-1, 1), code[4 * count :]
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=1).view(-1)
        whole = codes.view(torch.int8) - 8
    else:
        whole = codes.view(torch.int8)
    return (whole.view(-1, BLOCK) * scales).view(-1).to(dtype)


def size_of(length: int, bits: int, dtype: torch.dtype) -> int:
    """Bytes of a row of that many numbers, whole blocks."""
    return length * dtype.itemsize if bits not in LEVELS else length // BLOCK * (4 + BLOCK * bits // 8)
