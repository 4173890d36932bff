"""The lengths of samples that a script passes to `run.steps`, so that each batch has samples of similar length."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from unisono.data.computed_batches import IndexDataset
from unisono.data.prepared import PreparedDataset
from unisono.distributed.process_group import ProcessGroup
from unisono.errors import DataError, LoopError


def check_lengths(group: ProcessGroup, data: Any, lengths: Sequence[int] | None, *, shuffle: bool) -> tuple[int, ...]:
    """Return the length of each sample; () if the script passes none. Collective.

    Args:
        group: all processes of the run.
        data: the data set.
        lengths: as passed to `run.steps`.
        shuffle: as passed to `run.steps`.

    Raises:
        LoopError: the order of this data cannot follow lengths.
        DataError: there is not one length for each sample, or processes have other lengths.
    """
    if lengths is None:
        return ()
    if isinstance(data, (PreparedDataset, IndexDataset)):
        has_order = isinstance(data, PreparedDataset)
        kind = f"A {type(data).__name__} has an order of its own" if has_order else "There is no data set to order"
        raise LoopError("run.steps cannot group this data by length.", f"{kind}.", "leave out lengths=...")
    if not shuffle:
        raise LoopError(
            "run.steps was called with lengths=... and shuffle=False.",
            "Batches of similar length have another order than the data set.",
            "leave out one of the two.",
        )
    if len(lengths) != len(data):
        raise DataError(
            "run.steps needs the length of each sample.",
            f"It got {len(lengths):,} lengths for {len(data):,} samples.",
            "lengths=[len(sample) for sample in train_set].",
        )
    found = tuple(map(int, lengths))
    if len(set(group.all_gather_object(digest_of(found)))) > 1:
        raise DataError(
            "The lengths of the samples must be the same on every process.",
            "Each process takes its part of a batch by sample number, and the order of samples follows from lengths.",
            "compute them from the data alone: lengths=[len(sample) for sample in train_set].",
        )
    return found


def describe_length(length: int, lengths: tuple[int, ...]) -> int | str:
    """Return what the order of the samples depends on: their number, and their lengths if batches follow these."""
    return f"{length} samples by length ({digest_of(lengths)})" if lengths else length


def digest_of(lengths: tuple[int, ...]) -> str:
    """Return the first 8 digits of the sha256 of lengths."""
    return hashlib.sha256(repr(lengths).encode()).hexdigest()[:8]
