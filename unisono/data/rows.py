"""Batches to the bit as torch's default_collate makes them, by shorter ways.

Of a data set that is nothing but tensors a batch is one read of each, and no random number is drawn for it. Of tuples,
which most data sets give, default_collate asks last whether they are tuples, after everything else that they might be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import Subset, TensorDataset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map


def are_rows(data: Any, collate: Callable[[list[Any]], Any]) -> bool:
    """Is this torch's TensorDataset, or a Subset of one (random_split makes it), collated as usual?

    A class derived from them may do anything, so it is not. Nor are tensors that do not lie row by row in the CPU's
    memory: what default_collate makes of them is laid out otherwise.
    """
    while type(data) is Subset:
        data = data.dataset
    return type(data) is TensorDataset and collate is default_collate and all(map(_plain, data.tensors))


def read_rows(data: Any, samples: Sequence[int]) -> list[torch.Tensor]:
    """The batch of these samples, to the bit what default_collate makes of them one by one, in a third of the time."""
    while type(data) is Subset:
        samples, data = [data.indices[sample] for sample in samples], data.dataset
    index = torch.tensor(samples)
    return [tensor[index] for tensor in data.tensors]


def collate(samples: list[Any]) -> Any:
    """default_collate, which see, in two thirds of its time for tuples."""
    known = default_collate_fn_map  # by type; a script may have added to it
    first = samples[0]
    if type(first) is not tuple or tuple in known or len(set(map(len, samples))) > 1:
        return default_collate(samples)
    return [
        known[kind](column, collate_fn_map=known)
        if (kind := type(column[0])) in known
        else default_collate(list(column))
        for column in zip(*samples, strict=True)
    ]


def _plain(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous()
