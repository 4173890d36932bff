"""Batches at one alignment: every tensor and array of a micro-batch begins at a multiple of 64 bytes.

A kernel may round otherwise where its input begins in the middle of a vector register (a float32 Linear, say). torch
allocates at multiples of 64 bytes, and so does the shared memory through which a loader worker sends a tensor; memory
of numpy, and a slice of anything, begins anywhere. A batch must not show how it was fetched, so what is not aligned is
copied, with its strides, and what is aligned is left alone.

What cannot be aligned here: arrays that the loop itself makes (torch.from_numpy(numpy.stack(...))), and bytes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.data import Dataset

ALIGNMENT = 64
"""Bytes: a cache line, a register of AVX-512, and what torch's own allocator gives."""

MOST_CONTAINERS = 10_000
"""Containers and objects that are searched in one batch. An object may refer to a whole tokenizer."""

_PLAIN = frozenset({int, float, bool, complex, str, bytes, type(None), range, slice})
_CLOSED = (type, ModuleType, FunctionType, MethodType, torch.nn.Module, Dataset)
"""Objects that are no data of a batch, whatever they refer to."""

Memo = dict[int, tuple[Any, Any]]
"""By id: what was found, which keeps the id in use, and what became of it."""


def align(batch: Any) -> Any:
    """Return the batch with every tensor and numpy array in it at an address that is a multiple of ALIGNMENT.

    Looks into mappings, lists, tuples, and objects with attributes, at any depth. Containers with nothing to copy are
    returned as they are; others are copied, never changed, since a data set may own them. Conjugate and negative views
    are resolved, and arrays that are not contiguous are made so: a loader worker cannot send either as it is.
    """
    kind = type(batch)
    parts = batch if kind is list or kind is tuple else batch.values() if kind is dict else (batch,)
    return batch if all(map(_is_aligned, parts)) else _aligned(batch, {})


def _is_aligned(value: Any) -> bool:
    """Is this an ordinary tensor at such an address? The short way, which most batches take."""
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and value.data_ptr() % ALIGNMENT == 0
        and not (value.is_conj() or value.is_neg())
    )


def _aligned(value: Any, memo: Memo) -> Any:
    if type(value) in _PLAIN:
        return value
    if id(value) in memo:
        return memo[id(value)][1]
    memo[id(value)] = value, value  # a cycle ends here
    made = _remade(value, memo)
    memo[id(value)] = value, made
    return made


def _remade(value: Any, memo: Memo) -> Any:
    if isinstance(value, torch.Tensor):
        return _tensor(value, memo)
    if isinstance(value, np.ndarray):
        return _array(value)
    if len(memo) > MOST_CONTAINERS or isinstance(value, _CLOSED):
        return value
    if isinstance(value, Mapping):
        return _mapping(value, memo)
    if isinstance(value, (list, tuple)):
        if _PLAIN.issuperset(map(type, value)):
            return value
        parts = [_aligned(part, memo) for part in value]
        return value if _same(parts, value) else _sequence(value, parts)
    return _object(value, memo)


def _same(parts: Iterable[Any], of: Iterable[Any]) -> bool:
    return all(part is old for part, old in zip(parts, of, strict=True))


def _sequence(value: Any, parts: list[Any]) -> Any:
    if hasattr(value, "_fields"):  # a namedtuple
        return type(value)(*parts)
    if isinstance(value, tuple):
        return type(value)(parts)
    made = copy.copy(value)  # a list of one's own may have attributes
    made[:] = parts
    return made


def _mapping(value: Mapping[Any, Any], memo: Memo) -> Any:
    made = {key: _aligned(part, memo) for key, part in value.items()}
    moved = {key: part for key, part in made.items() if part is not value[key]}
    if not moved:
        return value
    if type(value) is dict:
        return made
    try:
        clone: Any = copy.copy(value)
        for key, part in moved.items():
            clone[key] = part
    except Exception:  # a mapping that cannot be changed, or copied
        return made
    return clone


def _object(value: Any, memo: Memo) -> Any:
    """Of an object with attributes: a shallow copy with those that had to move."""
    attributes = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                attributes[name] = getattr(value, name)
    moved = {name: made for name, part in attributes.items() if (made := _aligned(part, memo)) is not part}
    if not moved:
        return value
    try:
        clone = copy.copy(value)
    except Exception:  # it cannot be copied: then it is changed
        clone = value
    for name, part in moved.items():
        object.__setattr__(clone, name, part)  # a frozen dataclass, too
    return clone


def _tensor(t: torch.Tensor, memo: Memo) -> torch.Tensor:
    wrapper: bool = is_traceable_wrapper_subclass(t)  # else mypy takes the rest for unreachable
    if wrapper:
        return _wrapped(t, memo)
    if t.layout is torch.sparse_coo:
        old = t._indices(), t._values()
        indices, values = (_tensor(part, memo) for part in old)
        if _same((indices, values), old):
            return t
        return torch.sparse_coo_tensor(indices, values, t.shape, is_coalesced=t.is_coalesced(), check_invariants=False)
    if t.layout in (torch.sparse_csr, torch.sparse_bsr):
        return _compressed(t, (t.crow_indices(), t.col_indices(), t.values()), memo)
    if t.layout in (torch.sparse_csc, torch.sparse_bsc):
        return _compressed(t, (t.ccol_indices(), t.row_indices(), t.values()), memo)
    if t.layout is not torch.strided or t.is_meta:
        return t
    if t.is_conj() or t.is_neg():
        t = t.resolve_conj().resolve_neg()
    return t if t.data_ptr() % ALIGNMENT == 0 else moved(t)


def _wrapped(t: Any, memo: Memo) -> torch.Tensor:
    """A tensor that is made of others (a jagged NestedTensor, say)."""
    names, context = t.__tensor_flatten__()
    old = [getattr(t, name) for name in names]
    parts = [_aligned(part, memo) for part in old]
    if _same(parts, old):
        return t
    inner = dict(zip(names, parts, strict=True))
    made: torch.Tensor = type(t).__tensor_unflatten__(inner, context, t.size(), t.stride())
    return made


def _compressed(t: torch.Tensor, old: tuple[torch.Tensor, ...], memo: Memo) -> torch.Tensor:
    compressed, plain, values = (_tensor(part, memo) for part in old)
    if _same((compressed, plain, values), old):
        return t
    build: Any = torch.sparse_compressed_tensor  # torch's stub has another order of arguments
    made: torch.Tensor = build(compressed, plain, values, t.shape, layout=t.layout, check_invariants=False)
    return made


def moved(t: torch.Tensor) -> torch.Tensor:
    """Return a copy of a strided tensor in memory of its own, which torch aligns: of the same class, with the same
    strides, needing a gradient if it did. Gaps between its rows are kept, and what they hold is not."""
    with torch.no_grad() if t.grad_fn is None else nullcontext():
        plain = t if type(t) is torch.Tensor else t.as_subclass(torch.Tensor)
        made = plain.clone()
        if made.stride() != plain.stride() and not plain.is_nested:
            made = _with_strides(plain)
        if type(t) is not torch.Tensor:
            made = made.as_subclass(type(t))
            made.__dict__.update(t.__dict__)
    return made if t.grad_fn is not None else made.requires_grad_(t.requires_grad)


def _span(t: torch.Tensor) -> int:
    """Elements from the first to the last, with the gaps between them."""
    return 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))


def _with_strides(t: torch.Tensor) -> torch.Tensor:
    """A copy that leaves gaps and overlaps as they are."""
    span = _span(t)
    memory = torch.empty(span, dtype=t.dtype, device=t.device)
    if _overlaps(t):
        memory.copy_(t.as_strided((span,), (1,)))
        return memory.as_strided(t.shape, t.stride())
    return memory.as_strided(t.shape, t.stride()).copy_(t)


def _overlaps(t: torch.Tensor) -> bool:
    """May two elements have one address? As of an expanded tensor, and of windows that slide."""
    reach = 0
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def _array(a: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if a.dtype.hasobject or not a.nbytes or isinstance(a, np.ma.MaskedArray):
        return a
    order: Any = "F" if a.flags.f_contiguous and not a.flags.c_contiguous else "C"
    if a.flags[order] and a.__array_interface__["data"][0] % ALIGNMENT == 0:
        return a
    memory = torch.empty(a.nbytes, dtype=torch.uint8).numpy()
    made = memory.view(a.dtype).reshape(a.shape, order=order)
    made[...] = a
    return made if type(a) is np.ndarray else made.view(type(a))


def align_(tensors: Iterable[torch.Tensor]) -> None:
    """Move the memory of parameters and buffers that are not aligned; each tensor stays the same object.

    A model that is built of numpy arrays, or of a file that is mapped into memory, has parameters at any address, which
    may differ between processes; gathered from shards, they are aligned. Tensors that overlap each other stay where
    they are, since a model may mean them to. So do those of an accelerator: cuDNN wants an LSTM's in one piece.
    """
    ordinary = [t for t in dict.fromkeys(tensors) if _is_ordinary(t)]
    shared = _overlapping(ordinary)
    for t in ordinary:
        if t.data_ptr() % ALIGNMENT and id(t) not in shared:
            t.data = moved(t.detach())


def _is_ordinary(t: torch.Tensor) -> bool:
    wrapper: bool = is_traceable_wrapper_subclass(t)
    return not wrapper and t.layout is torch.strided and t.device.type == "cpu" and t.numel() > 0


def _overlapping(tensors: Sequence[torch.Tensor]) -> set[int]:
    """The ids of those whose memory another one uses as well."""
    found: set[int] = set()
    reach, last = 0, None
    for t in sorted(tensors, key=torch.Tensor.data_ptr):
        end = t.data_ptr() + t.element_size() * _span(t)
        if last is not None and t.data_ptr() < reach:
            found |= {id(t), id(last)}
        if end > reach:
            reach, last = end, t
    return found
