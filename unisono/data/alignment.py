"""Align batches: every tensor and array of a micro-batch begins at a multiple of 64 bytes.

A kernel (a float32 Linear, say) may round differently if its input begins in the middle of a vector register. torch
allocates at multiples of 64 bytes, and so does the shared memory through which a loader worker sends a tensor. numpy
arrays and slices begin anywhere. The bits must not depend on how a batch was fetched. So tensors that are not aligned
are copied, with their strides; aligned ones are not.

Not aligned here: arrays that the loop itself makes (torch.from_numpy(numpy.stack(...))), and bytes objects.
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
"""Bytes: a cache line, an AVX-512 register, and the alignment of torch's own allocator."""

MOST_CONTAINERS = 10_000
"""Containers and objects searched in one batch. An object may refer to a whole tokenizer."""

_PLAIN = frozenset({int, float, bool, complex, str, bytes, type(None), range, slice})
_CLOSED = (type, ModuleType, FunctionType, MethodType, torch.nn.Module, Dataset)
"""Types of objects that are not searched."""

Memo = dict[int, tuple[Any, Any]]
"""By id: the original, a reference that keeps the id in use, and its aligned form."""


def align(batch: Any) -> Any:
    """Return the batch with every tensor and numpy array in it at an address that is a multiple of ALIGNMENT.

    Searches mappings, lists, tuples, and objects with attributes, at any depth. Containers of aligned values are
    returned as they are. Others are copied, never changed, since a data set may own them. Conjugate and negative views
    are resolved, and arrays that are not contiguous become so: a loader worker cannot send either of them.
    """
    kind = type(batch)
    parts = batch if kind is list or kind is tuple else batch.values() if kind is dict else (batch,)
    return batch if all(map(_is_aligned, parts)) else _aligned(batch, {})


def _is_aligned(value: Any) -> bool:
    """Return whether this is an ordinary, aligned tensor. Most batches need no more than this test."""
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
    memo[id(value)] = value, value  # ends a cycle
    result = _align_value(value, memo)
    memo[id(value)] = value, result
    return result


def _align_value(value: Any, memo: Memo) -> Any:
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
    clone = copy.copy(value)  # a subclass of list may have attributes
    clone[:] = parts
    return clone


def _mapping(value: Mapping[Any, Any], memo: Memo) -> Any:
    aligned = {key: _aligned(part, memo) for key, part in value.items()}
    changed = {key: part for key, part in aligned.items() if part is not value[key]}
    if not changed:
        return value
    if type(value) is dict:
        return aligned
    try:
        clone: Any = copy.copy(value)
        for key, part in changed.items():
            clone[key] = part
    except Exception:  # a mapping that cannot be copied or changed
        return aligned
    return clone


def _object(value: Any, memo: Memo) -> Any:
    """Return a shallow copy of an object whose attributes had to be aligned, else the object."""
    attributes = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                attributes[name] = getattr(value, name)
    changed = {name: new for name, part in attributes.items() if (new := _aligned(part, memo)) is not part}
    if not changed:
        return value
    try:
        clone = copy.copy(value)
    except Exception:  # it cannot be copied, so it is changed in place
        clone = value
    for name, part in changed.items():
        object.__setattr__(clone, name, part)  # works for a frozen dataclass
    return clone


def _tensor(t: torch.Tensor, memo: Memo) -> torch.Tensor:
    wrapper: bool = is_traceable_wrapper_subclass(t)  # annotated, or mypy considers the rest unreachable
    if wrapper:
        return _wrapped(t, memo)
    if t.layout is torch.sparse_coo:
        old = t._indices(), t._values()  # noqa: SLF001  (the public ones need a coalesced tensor)
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
    return t if t.data_ptr() % ALIGNMENT == 0 else aligned_copy(t)


def _wrapped(t: Any, memo: Memo) -> torch.Tensor:
    """Align a tensor that wraps others (a jagged NestedTensor, say)."""
    names, context = t.__tensor_flatten__()
    old = [getattr(t, name) for name in names]
    parts = [_aligned(part, memo) for part in old]
    if _same(parts, old):
        return t
    inner = dict(zip(names, parts, strict=True))
    aligned: torch.Tensor = type(t).__tensor_unflatten__(inner, context, t.size(), t.stride())
    return aligned


def _compressed(t: torch.Tensor, old: tuple[torch.Tensor, ...], memo: Memo) -> torch.Tensor:
    compressed, plain, values = (_tensor(part, memo) for part in old)
    if _same((compressed, plain, values), old):
        return t
    build: Any = torch.sparse_compressed_tensor  # torch's stub orders the arguments differently
    aligned: torch.Tensor = build(compressed, plain, values, t.shape, layout=t.layout, check_invariants=False)
    return aligned


def aligned_copy(t: torch.Tensor) -> torch.Tensor:
    """Return a copy of a strided tensor in memory that torch allocates, which is aligned.

    The copy has the same class, strides and requires_grad. Gaps between its rows are kept, but not their content.
    """
    with torch.no_grad() if t.grad_fn is None else nullcontext():
        plain = t if type(t) is torch.Tensor else t.as_subclass(torch.Tensor)
        clone = plain.clone()
        if clone.stride() != plain.stride() and not plain.is_nested:
            clone = _clone_with_strides(plain)
        if type(t) is not torch.Tensor:
            clone = clone.as_subclass(type(t))
            clone.__dict__.update(t.__dict__)
    return clone if t.grad_fn is not None else clone.requires_grad_(t.requires_grad)


def _span(t: torch.Tensor) -> int:
    """Return the number of elements from the first to the last, gaps included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))


def _clone_with_strides(t: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same gaps and overlaps."""
    span = _span(t)
    memory = torch.empty(span, dtype=t.dtype, device=t.device)
    if _overlaps(t):
        memory.copy_(t.as_strided((span,), (1,)))
        return memory.as_strided(t.shape, t.stride())
    return memory.as_strided(t.shape, t.stride()).copy_(t)


def _overlaps(t: torch.Tensor) -> bool:
    """Return whether two elements may share an address, as in an expanded tensor or in sliding windows."""
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
    aligned = memory.view(a.dtype).reshape(a.shape, order=order)
    aligned[...] = a
    return aligned if type(a) is np.ndarray else aligned.view(type(a))


def align_(tensors: Iterable[torch.Tensor]) -> None:
    """Align the memory of parameters and buffers in place; each tensor stays the same object.

    The parameters of a model that is built from numpy arrays, or from a memory-mapped file, have any address, which may
    differ between processes; gathered from shards, they are aligned. Tensors that overlap each other are not moved,
    since the model may intend that. Nor are those of an accelerator: cuDNN needs an LSTM's in one piece.
    """
    ordinary = [t for t in dict.fromkeys(tensors) if _is_ordinary(t)]
    shared = _overlapping(ordinary)
    for t in ordinary:
        if t.data_ptr() % ALIGNMENT and id(t) not in shared:
            t.data = aligned_copy(t.detach())


def _is_ordinary(t: torch.Tensor) -> bool:
    wrapper: bool = is_traceable_wrapper_subclass(t)
    return not wrapper and t.layout is torch.strided and t.device.type == "cpu" and t.numel() > 0


def _overlapping(tensors: Sequence[torch.Tensor]) -> set[int]:
    """Return the ids of tensors whose memory overlaps that of another one."""
    found: set[int] = set()
    reach, last = 0, None
    for t in sorted(tensors, key=torch.Tensor.data_ptr):
        end = t.data_ptr() + t.element_size() * _span(t)
        if last is not None and t.data_ptr() < reach:
            found |= {id(t), id(last)}
        if end > reach:
            reach, last = end, t
    return found
