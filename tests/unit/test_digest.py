"""Digests: a hash changes with every bit, of tensors of every dtype and size; and two tensors are compared by bits."""

from __future__ import annotations

import pytest
import torch

from unisono.tensors.digest import content_digest, tensor_hashes
from unisono.tensors.spec import as_bytes
from unisono.train.diagnostics.bit_difference import bit_difference

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.complex64)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_counts(dtype: torch.dtype, ordered: bool) -> None:
    tensor = torch.arange(1, 12).to(dtype)
    before = tensor_hashes([tensor], ordered=ordered)
    flat = as_bytes(tensor)
    for byte in range(len(flat)):
        for bit in range(8):
            flat[byte] ^= 1 << bit
            assert tensor_hashes([tensor], ordered=ordered) != before, (byte, bit)
            flat[byte] ^= 1 << bit
    assert tensor_hashes([tensor], ordered=ordered) == before


@pytest.mark.parametrize("ordered", [False, True])
def test_a_hash_depends_on_elements_and_not_on_strides(ordered: bool) -> None:
    def hashed(tensor: torch.Tensor) -> list[int]:
        return tensor_hashes([tensor], ordered=ordered)

    whole = torch.randn(6, 4, 3, 5)
    assert hashed(whole[:, 1]) == hashed(whole[:, 1].clone())
    assert hashed(whole.to(memory_format=torch.channels_last)) == hashed(whole)
    assert hashed(whole.flatten()[1:8]) == hashed(whole.flatten()[1:8].clone())  # not at a multiple of a word
    assert hashed(whole.to_sparse()) == hashed(whole)
    assert hashed(torch.tensor([1 + 2j]).conj()) == hashed(torch.tensor([1 - 2j]))
    assert tensor_hashes([torch.empty(0), None, torch.tensor(True)], ordered=ordered) == [0, 0, 1]


def test_an_ordered_hash_sees_rows_that_change_places() -> None:
    rows = torch.randn(3000, 64)  # more words than are weighted at once
    rolled = rows.roll(1, 0)
    assert tensor_hashes([rows]) == tensor_hashes([rolled])
    assert tensor_hashes([rows], ordered=True) != tensor_hashes([rolled], ordered=True)


def test_a_content_digest_covers_dtypes_shapes_and_structure() -> None:
    values = [
        torch.zeros(2, 3),
        torch.zeros(3, 2),
        torch.zeros(2, 3, dtype=torch.int32),
        [torch.zeros(2, 3)],
        {"a": torch.zeros(2, 3)},
        {"b": torch.zeros(2, 3)},
        torch.zeros(0),
        0.0,
        -0.0,
    ]
    assert len({content_digest(value) for value in values}) == len(values)
    assert content_digest({"a": (torch.ones(2), 1)}) == content_digest({"a": (torch.ones(2), 1)})


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
