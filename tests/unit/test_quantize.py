"""Numbers in 8 or 4 bits: how far off, how long, and the same bytes every time."""

from __future__ import annotations

import pytest
import torch

from unisono.exchange.compression.quantize import BLOCK, LEVELS, decode, encode, size_of
from unisono.local_sgd.outer import fragments_of


def row(blocks: int = 7) -> torch.Tensor:
    """Blocks of very different size, one of them all zeros."""
    g = torch.Generator().manual_seed(1)
    numbers = torch.randn(blocks, BLOCK, generator=g) * 10.0 ** torch.arange(-3, blocks - 3).view(-1, 1)
    numbers[2] = 0
    return numbers.view(-1)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_number_is_off_by_more_than_half_a_scale(bits: int, dtype: torch.dtype) -> None:
    before = row().to(dtype)
    after = decode(encode(before, bits), bits, dtype)
    assert after.dtype == dtype
    scale = before.view(-1, BLOCK).abs().amax(1, keepdim=True) / LEVELS[bits]
    off = (before - after).view(-1, BLOCK).abs()
    assert bool((off <= scale * (0.5 + 1e-5)).all())
    assert after.view(-1, BLOCK)[2].count_nonzero() == 0


@pytest.mark.parametrize("bits", [8, 4])
def test_whole_multiples_of_the_scale_come_back_as_they_are(bits: int) -> None:
    most = LEVELS[bits]
    before = torch.arange(BLOCK).remainder(2 * most + 1).sub(most).float()
    assert torch.equal(decode(encode(before, bits), bits, torch.float32), before)


@pytest.mark.parametrize(("bits", "bytes_a_block"), [(32, 1024), (8, 260), (4, 132)])
def test_a_row_is_as_long_as_it_is_said_to_be(bits: int, bytes_a_block: int) -> None:
    code = encode(row(), bits)
    assert len(code) == 7 * bytes_a_block == size_of(7 * BLOCK, bits, torch.float32)
    assert torch.equal(code, encode(row(), bits))
    if bits == 32:
        assert torch.equal(decode(code, bits, torch.float32), row())


@pytest.mark.parametrize("sizes", [[1], [5, 1, 1, 1], [1, 1, 1, 100], [3] * 10, [0, 0, 7]])
def test_fragments_are_stretches_and_none_is_empty(sizes: list[int]) -> None:
    for count in range(1, len(sizes) + 1):
        stretches = fragments_of(sizes, count)
        assert len(stretches) == count
        assert all(stretches)
        assert [number for stretch in stretches for number in stretch] == list(range(len(sizes)))


def test_fragments_have_about_as_many_elements_each() -> None:
    assert fragments_of([4, 4, 4, 4, 16, 16], 3) == [[0, 1, 2, 3], [4], [5]]
