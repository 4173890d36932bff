"""Blocks of fewer bits: the error, the length, and the same codes every time."""

from __future__ import annotations

import pytest
import torch

from unisono.exchange.compression.block_quantizer import (
    BLOCK,
    BY_BITS,
    QUANTIZERS,
    decode_row,
    encode_row,
    row_bytes,
)


def normal_row(*, scale: float = 1.0, blocks: int = 4) -> torch.Tensor:
    g = torch.Generator().manual_seed(blocks)
    return torch.randn(blocks * BLOCK, generator=g) * scale


def uneven_row(blocks: int = 7) -> torch.Tensor:
    """Return blocks of very different magnitude, one of them all zeros."""
    g = torch.Generator().manual_seed(1)
    values = torch.randn(blocks, BLOCK, generator=g) * 10.0 ** torch.arange(-3, blocks - 3).view(-1, 1)
    values[2] = 0
    return values.view(-1)


@pytest.mark.parametrize(("kind", "error"), [("fp16", 2.0**-11), ("bf16", 2.0**-8), ("int8", 1 / 30), ("int4", 1 / 7)])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30, 1e-36, 65504.0])
def test_the_relative_error_is_small_at_any_magnitude(kind: str, error: float, scale: float) -> None:
    """The loss is a sum, so gradients may exceed fp16's range, or be far below it after division by the weight."""
    row = normal_row(scale=scale)
    encoded = QUANTIZERS[kind].encode(row)
    assert encoded.shape == (4, QUANTIZERS[kind].width)
    assert encoded.dtype is torch.uint8
    decoded = QUANTIZERS[kind].decode(encoded)
    assert (decoded.double() - row.double()).norm() < 2 * error * row.double().norm()


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_each_block_is_decoded_by_itself(kind: str) -> None:
    quantizer = QUANTIZERS[kind]
    encoded = quantizer.encode(normal_row(blocks=6))
    assert torch.equal(quantizer.decode(encoded[2:4]), quantizer.decode(encoded)[2 * BLOCK : 4 * BLOCK])
    assert torch.equal(quantizer.decode(quantizer.encode(torch.zeros(BLOCK))), torch.zeros(BLOCK))


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_a_decoded_row_loses_nothing_more(kind: str) -> None:
    quantizer = QUANTIZERS[kind]
    once = quantizer.decode(quantizer.encode(normal_row()))
    assert torch.allclose(quantizer.decode(quantizer.encode(once)), once, rtol=1e-6)


@pytest.mark.parametrize("bits", BY_BITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_element_is_off_by_more_than_half_a_scale(bits: int, dtype: torch.dtype) -> None:
    before = uneven_row().to(dtype)
    after = decode_row(encode_row(before, bits), bits, dtype)
    assert after.dtype == dtype
    scale = before.view(-1, BLOCK).abs().amax(1, keepdim=True) / BY_BITS[bits].largest
    error = (before - after).view(-1, BLOCK).abs()
    assert bool((error <= scale * (0.5 + 1e-5)).all())
    assert after.view(-1, BLOCK)[2].count_nonzero() == 0


@pytest.mark.parametrize("bits", BY_BITS)
def test_multiples_of_the_scale_are_exact(bits: int) -> None:
    largest = int(BY_BITS[bits].largest)
    before = torch.arange(BLOCK).remainder(2 * largest + 1).sub(largest).float()
    assert torch.equal(decode_row(encode_row(before, bits), bits, torch.float32), before)


@pytest.mark.parametrize(("bits", "block_bytes"), [(32, 1024), (8, 260), (4, 132)])
def test_a_row_has_the_announced_length(bits: int, block_bytes: int) -> None:
    encoded = encode_row(uneven_row(), bits)
    assert len(encoded) == 7 * block_bytes == row_bytes(7 * BLOCK, bits, torch.float32)
    assert torch.equal(encoded, encode_row(uneven_row(), bits))
    if bits == 32:
        assert torch.equal(decode_row(encoded, bits, torch.float32), uneven_row())
