"""Data sets of Hugging Face `datasets` in streaming mode (its IterableDataset), by their own shards.

https://huggingface.co/docs/datasets/stream
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from unisono.errors import DataError


class HuggingFaceShards:
    """Shards (unisono.data.streaming.stream.Shards) of a Hugging Face data set."""

    def __init__(self, dataset: Any) -> None:
        if not hasattr(dataset, "num_shards") or hasattr(dataset, "__len__"):  # a map-style data set has both
            raise DataError(
                f"Stream.hugging_face cannot read a {type(dataset).__name__}.",
                "It reads an IterableDataset, as load_dataset(..., streaming=True) returns it.",
                "pass any other data set to run.steps directly.",
            )
        self.dataset = dataset
        count = dataset.num_shards
        self.names = [f"shard {i} of {count}" for i in range(count)]

    def open(self, shard: int) -> HuggingFaceShard:
        return HuggingFaceShard(self.dataset.shard(num_shards=len(self.names), index=shard))

    def decode(self, raw: Any) -> Any:
        return raw


class HuggingFaceShard:
    """One shard; each iteration reads it from its beginning."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)
