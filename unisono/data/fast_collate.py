"""Batches to the bit as torch's default_collate makes them, by shorter ways.

Of a data set that is nothing but tensors a batch is one read of each, and no random number is drawn for it. Of tuples,
which most data sets give, default_collate asks last whether they are tuples, after everything else that they might be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import Subset, TensorDataset, default_collate
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map


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


def collate_as_at_home() -> None:
    """From now on this loader worker stacks tensors into the layout that the process itself would give them.

    In a worker torch stacks into shared memory, contiguously; elsewhere samples in channels_last make such a batch.
    """
    if default_collate_fn_map.get(torch.Tensor) is collate_tensor_fn:
        default_collate_fn_map[torch.Tensor] = _stack


def _stack(samples: Sequence[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
    if all(sample.dim() < 4 or _in_order(sample) for sample in samples):  # others have one layout
        stacked: torch.Tensor = collate_tensor_fn(samples, collate_fn_map=collate_fn_map)
        return stacked
    return torch.stack(list(samples))


def _in_order(tensor: torch.Tensor) -> bool:
    return tensor.stride() == torch.empty(tensor.shape, device="meta").stride()


def _plain(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous()
