"""Quantize rows of float32 in blocks of 256 elements that share a scale.

    256 elements  ->  scale = the largest of them / the largest code, as float32       4 bytes (bfloat16: none)
                      each element divided by the scale, as a code                     int8: 256 bytes, int4: 128

With integers each element is rounded to the nearest multiple of the scale, so none is off by more than half a scale:
1/254 (int8) or 1/14 (int4) of the largest element in its block. No random numbers are drawn: the same row always has
the same codes, on any process. Each block can be decoded by itself, so an encoded row can be cut between blocks.

What quantizing loses is kept by the sender and added to its next row (error feedback; Seide et al., 1-Bit Stochastic
Gradient Descent, Interspeech 2014). The exchanges that quantize do that (compressed.py, local_sgd/site_transport.py).

Dettmers et al., 8-bit Optimizers via Block-wise Quantization (arXiv 2110.02861), use blocks of 2,048 with nonlinear
codes. Streaming DiLoCo (Douillard et al., arXiv 2501.18512) sends floating-point numbers of 4 bits; integers are what a
processor without such numbers computes quickly.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from unisono.exchange.kernels.device_kernels import kernels_for

BLOCK = 256
"""Elements that share a scale. Its 4 bytes are 1.6 % of a block in 8 bits, 3.1 % in 4 bits."""


class BlockQuantizer(NamedTuple):
    """A format for blocks.

    Attributes:
        dtype: The dtype of the codes.
        largest: The code of a block's largest element; 0: the block has no scale.
        bits: The bits of a code.
    """

    dtype: torch.dtype
    largest: float
    bits: int

    @property
    def width(self) -> int:
        """Bytes of an encoded block."""
        return (4 if self.largest else 0) + BLOCK * self.bits // 8

    def encode(self, row: torch.Tensor) -> torch.Tensor:
        """Encode float32 [blocks * BLOCK] as uint8 [blocks, width]."""
        values = row.view(-1, BLOCK)
        if not self.largest:
            return values.to(self.dtype).view(torch.uint8)
        return kernels_for(values).encode(values, self.largest, self.bits)

    def decode(self, encoded: torch.Tensor) -> torch.Tensor:
        """Decode uint8 [blocks, width] to float32 [blocks * BLOCK]."""
        if not self.largest:
            return encoded.contiguous().view(self.dtype).float().view(-1)
        return kernels_for(encoded).decode(encoded, self.bits).view(-1)


QUANTIZERS = {
    # a block's largest element becomes 2^14, near float16's limit: elements 2^38 times smaller are lost, not 2^24
    "fp16": BlockQuantizer(torch.float16, 2.0**14, 16),
    "bf16": BlockQuantizer(torch.bfloat16, 0.0, 16),  # has the exponents of float32
    "int8": BlockQuantizer(torch.int8, 127.0, 8),
    "int4": BlockQuantizer(torch.int8, 7.0, 4),
}

BY_BITS = {8: QUANTIZERS["int8"], 4: QUANTIZERS["int4"]}
"""The quantizer of a row whose setting is a number of bits; 32 bits: the row is sent as it is."""


def encode_row(row: torch.Tensor, bits: int) -> torch.Tensor:
    """Encode a row of whole blocks in 32, 8 or 4 bits an element, as uint8 [bytes]."""
    if bits not in BY_BITS:
        return row.contiguous().view(torch.uint8)
    return BY_BITS[bits].encode(row.float()).view(-1)


def decode_row(encoded: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """Decode a row that `encode_row` has encoded."""
    if bits not in BY_BITS:
        return encoded.view(dtype)
    return BY_BITS[bits].decode(encoded.view(-1, BY_BITS[bits].width)).to(dtype)


def row_bytes(length: int, bits: int, dtype: torch.dtype) -> int:
    """Return the bytes of an encoded row of whole blocks."""
    return length * dtype.itemsize if bits not in BY_BITS else length // BLOCK * BY_BITS[bits].width
