"""Data sets of Hugging Face `datasets` in streaming mode (its IterableDataset), by their own shards.

https://huggingface.co/docs/datasets/stream
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from unisono.errors import DataError


class HuggingFaceShards:
    """Shards: see unisono.data.streaming.stream.Shards."""

    def __init__(self, dataset: Any) -> None:
        if not hasattr(dataset, "num_shards") or hasattr(dataset, "__len__"):  # a data set of rows has both
            raise DataError(
                f"Stream.hugging_face was given a {type(dataset).__name__}.",
                "It takes an IterableDataset, as load_dataset(..., streaming=True) returns it.",
                "any other data set goes into run.steps as it is.",
            )
        self.dataset = dataset
        count = dataset.num_shards
        self.names = [f"shard {i} of {count}" for i in range(count)]

    def open(self, shard: int) -> HuggingFaceShard:
        return HuggingFaceShard(self.dataset.shard(num_shards=len(self.names), index=shard))

    def decode(self, raw: Any) -> Any:
        return raw


class HuggingFaceShard:
    """One shard, from its beginning, as often as asked."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)
