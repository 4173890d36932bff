"""The batches of torch's default_collate, to the bit, in less time.

A batch of a data set that consists of tensors is one read of each tensor and draws no random number. For tuples, which
most data sets return, default_collate tests for all other types first; here they are tested first, and tuples of
tensors before all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import Subset, TensorDataset, default_collate, get_worker_info
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

from unisono.data.worker_messages import MOST_BYTES


def are_rows(data: Any, collate: Callable[[list[Any]], Any]) -> bool:
    """Return whether this is torch's TensorDataset, or a Subset of one (as of random_split), with default_collate.

    Derived classes are excluded, since they may do anything. So are tensors that are not contiguous in the CPU's
    memory: default_collate gives their batches another layout.
    """
    while type(data) is Subset:
        data = data.dataset
    return type(data) is TensorDataset and collate is default_collate and all(map(_is_plain, data.tensors))


def read_rows(data: Any, samples: Sequence[int]) -> list[torch.Tensor]:
    """Return the batch of these samples: the bits of default_collate, in a third of its time."""
    while type(data) is Subset:
        samples, data = [data.indices[sample] for sample in samples], data.dataset
    index = torch.tensor(samples)
    return [tensor[index] for tensor in data.tensors]


def stack_tensors(samples: list[Any]) -> list[torch.Tensor] | None:
    """Return the batch of samples that are tuples of tensors; None if they are not, or in a loader worker.

    The bits are those of default_collate. The tensors are new, so torch has aligned them (alignment.py).
    """
    known, first = default_collate_fn_map, samples[0]
    if type(first) is not tuple or tuple in known or known.get(torch.Tensor) is not collate_tensor_fn:
        return None
    for value in first:
        if type(value) is not torch.Tensor or value.layout is not torch.strided or value.is_nested:
            return None
    if get_worker_info() is not None:  # torch stacks into shared memory there
        return None
    try:
        columns = list(zip(*samples, strict=True))
    except (TypeError, ValueError):  # not all are tuples of this length
        return None
    batch = [torch.stack(column) for column in columns]
    for tensor in batch:
        if type(tensor) is not torch.Tensor:  # a later sample has a subclass
            return None
    return batch


def collate(samples: list[Any]) -> Any:
    """Collate samples like default_collate, in two thirds of its time for tuples."""
    known = default_collate_fn_map  # by type; scripts may add to it
    first = samples[0]
    if type(first) is not tuple or tuple in known or len(set(map(len, samples))) > 1:
        return default_collate(samples)
    return [
        known[kind](column, collate_fn_map=known)
        if (kind := type(column[0])) in known
        else default_collate(list(column))
        for column in zip(*samples, strict=True)
    ]


def stack_as_without_workers() -> None:
    """Let this loader worker stack tensors into the type and the layout that they get without workers.

    In a worker torch stacks into shared memory of the first sample's type, contiguously. Without one, samples of mixed
    types are promoted, and samples in channels_last make such a batch. Small stacks are not put in shared memory, since
    they are sent as bytes (worker_messages.py).
    """
    if default_collate_fn_map.get(torch.Tensor) is collate_tensor_fn:
        default_collate_fn_map[torch.Tensor] = _stack


def _stack(samples: Sequence[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
    first = samples[0]
    stacks = first.layout is torch.strided and not first.is_nested  # others make torch raise an error
    if stacks and (first.nbytes * len(samples) <= MOST_BYTES or not all(_is_as(first, each) for each in samples)):
        return torch.stack(list(samples))
    stacked: torch.Tensor = collate_tensor_fn(samples, collate_fn_map=collate_fn_map)
    return stacked


def _is_as(first: torch.Tensor, sample: torch.Tensor) -> bool:
    """Return whether a sample has the type of the first one, and a contiguous layout."""
    if sample.dtype is not first.dtype:
        return False
    return sample.dim() < 4 or _is_contiguous_layout(sample)  # fewer dimensions have one layout


def _is_contiguous_layout(tensor: torch.Tensor) -> bool:
    return tensor.stride() == torch.empty(tensor.shape, device="meta").stride()


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous()
