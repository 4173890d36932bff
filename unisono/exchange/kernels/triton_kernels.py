"""The kernels of reference.py for CUDA, in Triton: each reads its input and writes its result once.

A program of a kernel handles some thousand elements or some blocks of 256. The bits are those of torch's operations:
division is rounded as IEEE 754 demands (`div_rn`), and no kernel multiplies and adds, so nothing is contracted.
"""

# mypy: disable-error-code="no-untyped-def"
# (Triton looks up the names in annotations.)

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl

SPAN = 2048
"""Elements of a program that has no blocks."""

ROWS = 16
"""Blocks of a program that encodes or decodes."""

ROUND = 12582912.0
"""1.5 * 2**23: adding and subtracting it rounds float32 below 2**22 to integers, and halves to even ones."""


def divide_(flat: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    """Divide in place. Return whether all elements of the result are finite, as a tensor."""
    found = torch.ones(1, dtype=torch.bool, device=flat.device)
    with _device_of(flat):
        _divide[_programs(len(flat), SPAN)](flat, divisor, found, len(flat), SPAN=SPAN)
    return found[0]


def add_and_divide(a: torch.Tensor, b: torch.Tensor, divisor: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write (a + b) / divisor to `out`. Return whether all elements of it are finite, as a tensor."""
    found = torch.ones(1, dtype=torch.bool, device=out.device)
    with _device_of(out):
        _add_and_divide[_programs(len(out), SPAN)](a, b, divisor, out, found, len(out), SPAN=SPAN)
    return found[0]


def encode(values: torch.Tensor, largest: float, bits: int) -> torch.Tensor:
    """Encode float32 [blocks, length] as uint8 [blocks, 4 + length * bits / 8]."""
    rows, length = values.shape
    encoded = torch.empty(rows, 4 + length * bits // 8, dtype=torch.uint8, device=values.device)
    scales, codes = _parts(encoded, bits)
    constants = {"LENGTH": length, "BITS": bits, "ROWS": ROWS, "ROUND": ROUND}
    with _device_of(values):
        _encode[_programs(rows, ROWS)](values, scales, codes, rows, encoded.shape[1], largest, **constants)
    return encoded


def decode(encoded: torch.Tensor, bits: int) -> torch.Tensor:
    """Decode uint8 [blocks, 4 + length * bits / 8] to float32 [blocks, length]."""
    if encoded.data_ptr() % 4:  # a part of a message; scales have four bytes
        encoded = encoded.clone()
    rows, width = encoded.shape
    length = (width - 4) * 8 // bits
    values = torch.empty(rows, length, dtype=torch.float32, device=encoded.device)
    scales, codes = _parts(encoded, bits)
    with _device_of(values):
        _decode[_programs(rows, ROWS)](scales, codes, values, rows, width, LENGTH=length, BITS=bits, ROWS=ROWS)
    return values


def _device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Return a block in which kernels run on the tensor's device. (Triton's interpreter runs on the CPU.)"""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def _programs(size: int, each: int) -> tuple[int]:
    return (triton.cdiv(max(size, 1), each),)


def _parts(encoded: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the memory of `encoded` as scales, and as codes from the first one on."""
    flat = encoded.view(-1)
    kinds = {4: torch.uint8, 8: torch.int8, 16: torch.float16}
    return flat.view(torch.float32), flat[4:].view(kinds[bits])


@triton.jit
def _divide(flat, divisor, found, size, SPAN: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN)
    inside = places < size
    values = tl.load(flat + places, mask=inside, other=0.0)
    values = tl.div_rn(values, tl.load(divisor).to(tl.float32))
    tl.store(flat + places, values, mask=inside)
    bad = inside & (tl.abs(values) >= float("inf")) | inside & (values != values)
    tl.store(found, False, mask=tl.max(bad.to(tl.int32), 0) > 0)


@triton.jit
def _add_and_divide(a, b, divisor, out, found, size, SPAN: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN)
    inside = places < size
    values = tl.load(a + places, mask=inside, other=0.0) + tl.load(b + places, mask=inside, other=0.0)
    values = tl.div_rn(values, tl.load(divisor).to(tl.float32))
    tl.store(out + places, values, mask=inside)
    bad = inside & (tl.abs(values) >= float("inf")) | inside & (values != values)
    tl.store(found, False, mask=tl.max(bad.to(tl.int32), 0) > 0)


@triton.jit
def _encode(
    values,
    scales,
    codes,
    rows,
    width,
    largest,
    LENGTH: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    ROUND: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    if BITS == 4:  # the even and the odd elements of a block, of which each byte holds a pair
        pairs = row[:, None] * LENGTH + 2 * tl.arange(0, LENGTH // 2)[None, :]
        low = tl.load(values + pairs, mask=inside[:, None], other=0.0)
        high = tl.load(values + pairs + 1, mask=inside[:, None], other=0.0)
        top = _largest(tl.join(tl.abs(low), tl.abs(high)).reshape(ROWS, LENGTH))
        scale = _scale(top, largest)
        byte = (_rounded(low, scale, largest, ROUND) + 8) | ((_rounded(high, scale, largest, ROUND) + 8) << 4)
        to = row[:, None] * width + tl.arange(0, LENGTH // 2)[None, :]
        tl.store(codes + to, byte.to(tl.uint8), mask=inside[:, None])
    else:
        places = row[:, None] * LENGTH + tl.arange(0, LENGTH)[None, :]
        block = tl.load(values + places, mask=inside[:, None], other=0.0)
        scale = _scale(_largest(tl.abs(block)), largest)
        to = tl.arange(0, LENGTH)[None, :]
        if BITS == 8:
            code = _rounded(block, scale, largest, ROUND).to(tl.int8)
            tl.store(codes + row[:, None] * width + to, code, mask=inside[:, None])
        else:
            half = tl.div_rn(block, _wide(scale, block)).to(tl.float16)
            tl.store(codes + row[:, None] * (width // 2) + to, half, mask=inside[:, None])
    tl.store(scales + row * (width // 4), scale, mask=inside)


@triton.jit
def _decode(
    scales,
    codes,
    values,
    rows,
    width,
    LENGTH: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    scale = tl.load(scales + row * (width // 4), mask=inside, other=1.0)[:, None]
    if BITS == 4:
        place = tl.arange(0, LENGTH // 2)[None, :]
        byte = tl.load(codes + row[:, None] * width + place, mask=inside[:, None], other=0).to(tl.int32)
        to = row[:, None] * LENGTH + 2 * place
        tl.store(values + to, ((byte & 15) - 8).to(tl.float32) * scale, mask=inside[:, None])
        tl.store(values + to + 1, ((byte >> 4) - 8).to(tl.float32) * scale, mask=inside[:, None])
    else:
        place = tl.arange(0, LENGTH)[None, :]
        stride = width if BITS == 8 else width // 2
        code = tl.load(codes + row[:, None] * stride + place, mask=inside[:, None], other=0)
        tl.store(values + row[:, None] * LENGTH + place, code.to(tl.float32) * scale, mask=inside[:, None])


@triton.jit
def _largest(magnitudes):
    """Return the largest of each row; NaN if one is NaN, as amax does."""
    bad = tl.max((magnitudes != magnitudes).to(tl.int32), 1) > 0
    return tl.where(bad, float("nan"), tl.max(magnitudes, 1))


@triton.jit
def _scale(top, largest):
    scale = tl.div_rn(top, _wide_scalar(largest, top))
    return tl.where(scale == 0.0, 1.0, scale)


@triton.jit
def _rounded(values, scale, largest, ROUND: tl.constexpr):
    """Return values / scale, rounded to integers from -largest to largest, as int32."""
    codes = tl.div_rn(values, _wide(scale, values))
    codes = (codes + ROUND) - ROUND
    return tl.minimum(tl.maximum(codes, -largest), largest).to(tl.int32)


@triton.jit
def _wide(scale, like):
    return tl.broadcast_to(scale[:, None], like.shape)


@triton.jit
def _wide_scalar(number, like):
    return tl.zeros_like(like) + number
