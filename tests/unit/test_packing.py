"""Packing: every token once, whole samples, what models need, and lengths that change."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset

from tests.shards import write_lines
from unisono.data.mixture import Mixture
from unisono.data.packing import Packed, document_bounds, document_mask, next_tokens
from unisono.data.streaming.stream import Stream
from unisono.distributed.init import join_process_group as join
from unisono.environment import World
from unisono.errors import DataError
from unisono.plan.packing.block_plan import cut_blocks, fit_blocks


class Texts(Dataset[Any]):
    """Sample i has lengths[i] tokens: 1000 i, 1000 i + 1, ..."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> Any:
        return [1000 * i + j for j in range(self.lengths[i])]


def prepared(data: Packed, on_error: Any = "stop") -> Packed:
    with join(World()) as group:
        data.prepare(group, on_error, lambda text: None)
    return data


@given(st.lists(st.integers(0, 40), max_size=60), st.integers(1, 17), st.integers(1, 20))
def test_every_token_is_in_one_block(lengths: list[int], length: int, group: int) -> None:
    sizes = np.array(lengths, dtype=np.int64)
    for blocks in (cut_blocks(sizes, length), fit_blocks(sizes, length, group)):
        seen = [
            (piece.sample, place)
            for number in range(len(blocks))
            for piece in blocks[number]
            for place in range(piece.begin, piece.end)
        ]
        assert sorted(seen) == [(i, j) for i, size in enumerate(lengths) for j in range(size)]
        filled = [sum(piece.end - piece.begin for piece in blocks[number]) for number in range(len(blocks))]
        assert all(0 < fill <= length for fill in filled)
        if blocks.__class__.__name__ == "CutBlocks":
            assert all(fill == length for fill in filled[:-1])
            assert seen == sorted(seen)


def test_whole_samples_stay_whole_and_fill_blocks_well() -> None:
    lengths = np.random.default_rng(1).integers(1, 64, 5000)
    blocks = fit_blocks(lengths, 64, 1000)
    pieces = [piece for number in range(len(blocks)) for piece in blocks[number]]
    assert len(pieces) == 5000
    assert all(piece.begin == 0 and piece.end == lengths[piece.sample] for piece in pieces)
    assert lengths.sum() / (64 * len(blocks)) > 0.97
    groups = [{piece.sample // 1000 for piece in blocks[number]} for number in range(len(blocks))]
    assert all(len(group) == 1 for group in groups)


def test_a_block_of_cut_samples() -> None:
    data = prepared(Packed(Texts([5, 2, 4]), 4, fill={"input_ids": 7}))
    assert len(data) == len(Packed(Texts([5, 2, 4]), 4)) == 3
    block = data[1]
    assert block["input_ids"].tolist() == [4, 1000, 1001, 2000]
    assert block["document_ids"].tolist() == [0, 1, 1, 2]
    assert block["position_ids"].tolist() == [0, 0, 1, 0]
    last = data[2]
    assert last["input_ids"].tolist() == [2001, 2002, 2003, 7]
    assert last["document_ids"].tolist() == [0, 0, 0, -1]
    assert pickle.loads(pickle.dumps(data))[2]["input_ids"].tolist() == last["input_ids"].tolist()


def test_dicts_keep_their_keys_and_types() -> None:
    class Labeled(Texts):
        def __getitem__(self, i: int) -> Any:
            tokens = np.array(super().__getitem__(i))
            return {"tokens": tokens.astype(np.int32), "labels": tokens + 1, "vectors": torch.ones(len(tokens), 2)}

    data = prepared(Packed(Labeled([3, 2, 6]), 8, keep_whole=True))
    blocks = data.__getitems__([0, 1])
    assert [block["document_ids"].tolist() for block in blocks] == [[0] * 3 + [-1] * 5, [0] * 2 + [1] * 6]
    assert blocks[0]["tokens"].dtype is torch.int32
    assert blocks[0]["labels"].tolist() == [1, 2, 3, -100, -100, -100, -100, -100]
    assert blocks[1]["vectors"].shape == (8, 2)


def test_blocks_of_a_stream_are_per_shard(tmp_path: Path) -> None:
    stream = Stream.json_lines(write_lines(tmp_path), window=6, map=lambda sample: [sample["cls"]] * sample["cls"])
    data = prepared(Packed(stream, 10))
    tokens = torch.cat([data[i]["input_ids"][data[i]["document_ids"] >= 0] for i in range(len(data))])
    assert tokens.tolist() == [i for i in range(25) for _ in range(i)]
    layout = data.layout()
    assert layout.shards == (3, 0, 17, 11)
    assert layout.window == -(-6 * 31 // 25)
    assert data.name_of(30).startswith("block 30, which begins in ")
    assert data.name_of(30).endswith("part-3.jsonl[4]")
    mixed = Mixture({"packed": data, "texts": Texts([4])}, [3, 1])
    assert mixed[5]["input_ids"].shape == (10,)


def test_a_damaged_sample_is_skipped_by_packing(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("[1, 2, 3]\nno\n[4, 5]\n")
    data = prepared(Packed(Stream.json_lines(tmp_path / "x.jsonl"), 4), "skip")
    assert [data[i]["input_ids"].tolist() for i in range(len(data))] == [[1, 2, 3, 4], [5, 0, 0, 0]]


def test_lengths_are_kept_in_a_file(tmp_path: Path) -> None:
    class Counted(Texts):
        read = 0

        def __getitem__(self, i: int) -> Any:
            Counted.read += 1
            return super().__getitem__(i)

    path = tmp_path / "lengths.json"
    assert len(prepared(Packed(Counted([5, 2, 4]), 4, lengths=path))) == 3
    assert Counted.read == 3
    assert len(prepared(Packed(Counted([5, 2, 4]), 8, lengths=path))) == 2
    assert Counted.read == 3
    assert len(prepared(Packed(Counted([5, 2]), 4, lengths=path))) == 2  # other data: measured again
    assert Counted.read == 5
    path.write_text("{")
    with pytest.raises(DataError, match="Cannot read the lengths"):
        prepared(Packed(Counted([5, 2]), 4, lengths=path))
    assert len(prepared(Packed(Counted([5, 2]), 4, lengths=[5, 2]))) == 2
    assert Counted.read == 5


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="length of a block cannot be 0"):
        Packed(Texts([1]), 0)
    with pytest.raises(DataError, match="A Mixture cannot be packed"):
        Packed(Mixture([Texts([1])], [1]), 4)
    with pytest.raises(DataError, match="Cannot write the lengths"):
        prepared(Packed(Texts([1]), 4, lengths=tmp_path / "nowhere" / "lengths.json"))
    with pytest.raises(DataError, match="lengths of 2 samples, and the data has 1"):
        prepared(Packed(Texts([1]), 4, lengths=[1, 1]))
    wrong = prepared(Packed(Texts([5, 2]), 4, lengths=[5, 3]))
    with pytest.raises(DataError, match="Sample 1 has 2 tokens, and had 3 when it was measured"):
        wrong[1]

    class Uneven(Texts):
        def __getitem__(self, i: int) -> Any:
            return {"a": [1, 2], "b": [1]}

    with pytest.raises(DataError, match=r"sample 0 have different lengths\.\n  They have 2 \(a\), 1 \(b\)"):
        prepared(Packed(Uneven([1]), 4))

    class Words(Texts):
        def __getitem__(self, i: int) -> Any:
            return {"text": "words"}

    with pytest.raises(DataError, match="a str under text"):
        prepared(Packed(Words([1]), 4))


# -- what models need


def test_targets_stay_within_their_document() -> None:
    data = prepared(Packed(Texts([3, 2, 4]), 6))
    batch = torch.utils.data.default_collate([data[0], data[1]])
    targets = next_tokens(batch["input_ids"], batch["document_ids"])
    assert targets.tolist() == [[1, 2, -100, 1001, -100, -100], [2002, 2003, -100, -100, -100, -100]]


def attention(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    return F.scaled_dot_product_attention(x, x, x, attn_mask=mask, is_causal=mask is None)


def test_attention_with_the_mask_is_attention_of_each_document() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1, -1], [0, 1, 1, 1, 1, 1]])
    x = torch.randn(2, 1, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    packed = attention(x, document_mask(documents))
    bounds, longest = document_bounds(documents)
    assert bounds.tolist() == [0, 3, 5, 6, 7, 12]
    assert bounds.dtype is torch.int32
    assert longest == 5
    flat = x.transpose(1, 2).reshape(12, 1, 4)
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        alone = attention(flat[begin:end].transpose(0, 1)[None], None)
        together = packed.transpose(1, 2).reshape(12, 1, 4)[begin:end].transpose(0, 1)[None]
        torch.testing.assert_close(together, alone, rtol=0, atol=1e-14)
    both = document_mask(documents, causal=False)
    assert both[0, 0].tolist()[0] == [True, True, True, False, False, False]
    assert both[0, 0].tolist()[5] == [False] * 5 + [True]


def test_two_documents_that_meet_at_a_border_of_blocks_stay_apart() -> None:
    bounds, longest = document_bounds(torch.zeros(2, 3, dtype=torch.int64))
    assert (bounds.tolist(), longest) == ([0, 3, 6], 3)
