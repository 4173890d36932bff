"""A digest changes with every bit, of tensors of every kind and size; and where two differ is told."""

from __future__ import annotations

import pytest
import torch

from unisono.train.diagnostics.tensor_hash import bit_difference, digest, digests, raw_bytes

KINDS = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.complex64)


@pytest.mark.parametrize("dtype", KINDS)
def test_every_bit_counts(dtype: torch.dtype) -> None:
    tensor = torch.arange(1, 12).to(dtype)
    before = digest([tensor])
    flat = raw_bytes(tensor)
    for byte in range(len(flat)):
        for bit in range(8):
            flat[byte] ^= 1 << bit
            assert digest([tensor]) != before, (byte, bit)
            flat[byte] ^= 1 << bit
    assert digest([tensor]) == before


def test_it_is_the_content_and_its_order_not_where_it_lies() -> None:
    whole = torch.randn(6, 4, 3, 5)
    assert digests([whole[:, 1]]) == digests([whole[:, 1].clone()])
    assert digests([whole.to(memory_format=torch.channels_last)]) == digests([whole])
    assert digests([whole.flatten()[1:8]]) == digests([whole.flatten()[1:8].clone()])  # not at a multiple of a word
    assert digests([whole.to_sparse()]) == digests([whole])
    assert digests([torch.empty(0), None, torch.tensor(True)]) == [0, 0, 1]
    assert digest([whole, whole[0]]) != digest([whole[0], whole])


def test_where_two_differ() -> None:
    right = torch.zeros(3, 4)
    right[1, 2] = 0.5
    mine = right.clone()
    assert bit_difference(mine, right) is None
    mine[1, 2], mine[2, 0] = 0.75, 1.0
    assert (
        str(bit_difference(mine, right)) == "2 of 12 elements, the first at [1, 2]: 0.75 instead of 0.5 (bit 22 of it)"
    )
    one = bit_difference(torch.tensor(-0.0), torch.tensor(0.0))
    assert one is not None
    assert (one.place, one.bits) == ((), [31])
