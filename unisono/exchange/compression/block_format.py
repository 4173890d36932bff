"""Forms in which a long row of float32 travels: blocks of fewer bits, or its largest elements alone.

A code is a function of the row: the same row has the same form on any process. Blocks end where they end in the row,
so that a form can be cut between them, and each part be read by itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

BLOCK = 256
"""Elements that share a scale: its 4 bytes are 1.6 % of theirs in 8 bits. (Dettmers et al., 8-bit Optimizers via
Block-wise Quantization, arXiv 2110.02861, use 2,048 with a code that is not linear.)"""


class BlockFormat(NamedTuple):
    """A block in `dtype`, after division by its scale. `whole`: its largest element becomes about this; 0: no scale."""

    dtype: torch.dtype
    whole: float

    @property
    def width(self) -> int:
        """Bytes of a block."""
        return (4 if self.whole else 0) + BLOCK * self.dtype.itemsize

    def encode(self, row: torch.Tensor) -> torch.Tensor:
        """row float32 [blocks * BLOCK] -> bytes [blocks, width]."""
        blocks = row.view(-1, BLOCK)
        if not self.whole:
            return blocks.to(self.dtype).view(torch.uint8)
        scale = blocks.abs().amax(1, keepdim=True).div_(self.whole)
        scale.masked_fill_(scale == 0, 1.0)
        small = blocks / scale
        small = small.round_().clamp_(-self.whole, self.whole) if not self.dtype.is_floating_point else small
        return torch.cat([scale.view(torch.uint8), small.to(self.dtype).view(torch.uint8)], 1)

    def decode(self, form: torch.Tensor) -> torch.Tensor:
        """What it stands for, float32 [blocks * BLOCK]."""
        if not self.whole:
            return form.contiguous().view(self.dtype).float().view(-1)
        scale = form[:, :4].contiguous().view(torch.float32)
        return form[:, 4:].contiguous().view(self.dtype).float().mul_(scale).view(-1)


CODES = {
    "fp16": BlockFormat(
        torch.float16, 2.0**14
    ),  # as far up as it goes: what is 2^38 times smaller is lost, instead of 2^24
    "bf16": BlockFormat(torch.bfloat16, 0.0),  # has the exponents of float32
    "int8": BlockFormat(torch.int8, 127.0),
}

NEEDS_FEEDBACK = ("int8", "topk", "powersgd")
"""Kinds that leave out so much that it is kept, and added to the next gradient (error feedback: Karimireddy et al.,
arXiv 1901.09847). fp16 and bf16 round to 11 and 8 bits, which a step's noise exceeds by far."""


def largest(row: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` elements of a row that are largest in size: where they are, int32 [count] in rising order, and what.
    (Top-k: Aji and Heafield, arXiv 1704.05021.)"""
    places = row.abs().topk(count, sorted=False).indices.sort().values
    return places.int(), row[places]
