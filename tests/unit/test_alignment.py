"""Tensors and arrays of a batch are aligned to 64 bytes; aligned ones are not copied."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from unisono.data.alignment import ALIGNMENT, align, align_

MEMORY = torch.arange(200.0)


def off(*shape: int) -> torch.Tensor:
    """Return numbers that begin in the middle of a cache line."""
    return MEMORY[1 : 1 + int(np.prod(shape))].view(shape)


def address(value: Any) -> int:
    at = value.__array_interface__["data"][0] if isinstance(value, np.ndarray) else value.data_ptr()
    return int(at) % ALIGNMENT


class Tagged(torch.Tensor):
    """A class of tensors with an attribute."""


def tagged() -> Tagged:
    t = off(4).as_subclass(Tagged)
    t.tag = "boxes"  # type: ignore[attr-defined]
    return t


STRIDED = {
    "a slice": off(3, 13),
    "of numpy": torch.from_numpy(np.arange(40, dtype=np.float32)[1:14]),
    "columns": off(10, 5)[:, :3],
    "transposed": off(10, 5).t(),
    "channels last": off(2, 3, 4, 5)
    .to(memory_format=torch.channels_last)
    .reshape(-1)[1:61]
    .view(5, 4, 3)
    .permute(2, 1, 0),
    "expanded": off(13).expand(4, 13),
    "expanded columns": off(10, 5)[:, :1].expand(10, 7),
    "sliding": off(50).unfold(0, 5, 2),
    "one number": MEMORY[1],
    "bfloat16": torch.arange(20, dtype=torch.bfloat16)[1:14],
    "that learns": off(5).clone()[:].detach()[1:].requires_grad_(),
    "a parameter": torch.nn.Parameter(off(6)),
    "of a class": tagged(),
}


@pytest.mark.parametrize("t", STRIDED.values(), ids=STRIDED)
def test_a_tensor_is_copied_with_its_strides(t: torch.Tensor) -> None:
    assert address(t)
    made = align(t)
    assert address(made) == 0
    assert made.equal(t)
    assert (made.dtype, made.stride(), made.requires_grad, type(made)) == (
        t.dtype,
        t.stride(),
        t.requires_grad,
        type(t),
    )
    assert made.__dict__ == t.__dict__
    assert align(made) is made


def test_a_tensor_keeps_its_autograd_history() -> None:
    leaf = torch.ones(20, requires_grad=True)
    made = align((leaf * 2)[1:])
    assert address(made) == 0
    made.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [0.0] + [2.0] * 19


@pytest.mark.parametrize("view", [torch.Tensor.conj, lambda z: z.conj().imag])
def test_conjugate_and_negative_views_are_resolved(view: Any) -> None:
    z = view(torch.view_as_complex(torch.arange(20.0).view(10, 2)))
    assert z.is_conj() or z.is_neg()
    made = align([z])[0]
    assert not made.is_conj()
    assert not made.is_neg()
    assert made.equal(z)


@pytest.mark.filterwarnings("ignore:Sparse CS")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch 2.11, for coalesce
def test_the_parts_of_sparse_and_jagged_tensors() -> None:
    coo = torch.sparse_coo_tensor(torch.arange(8).view(2, 4)[:, 1:], off(3), (9, 9), check_invariants=True).coalesce()
    loose = torch.sparse_coo_tensor(torch.zeros(2, 3, dtype=torch.int64), off(3), (9, 9), check_invariants=True)
    for t in (coo, loose):
        made = align(t)
        assert made.is_coalesced() == t.is_coalesced()
        assert address(made._indices()) == address(made._values()) == 0
        assert made.to_dense().equal(t.to_dense())
    ends, columns = torch.tensor([9, 0, 1, 3])[1:], torch.tensor([9, 0, 1, 2])[1:]
    csr = torch.sparse_csr_tensor(ends, columns, off(3), (2, 4), check_invariants=True)
    csc = torch.sparse_csc_tensor(ends, columns, off(3), (4, 2), check_invariants=True)
    for t in (csr, csc):
        made = align(t)
        assert made.layout is t.layout
        assert address(made.values()) == 0
        assert made.to_dense().equal(t.to_dense())
    jagged = torch.nested.nested_tensor_from_jagged(off(6, 2), torch.tensor([0, 2, 6]))
    made = align(jagged)
    assert address(made.values()) == 0
    assert made.values().equal(jagged.values())
    assert align(made) is made


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any = 1


@dataclass(slots=True)
class Slotted:
    x: Any
    y: Any = 1


CONTAINERS = {
    "list": lambda x: [x, 1],
    "tuple": lambda x: (x, 1),
    "namedtuple": lambda x: Pair(x, 1),
    "dict": lambda x: {"x": x},
    "ordered": lambda x: OrderedDict(x=x),
    "mapping": lambda x: UserDict(x=x),
    "one that does not change": lambda x: MappingProxyType({"x": x}),
    "dataclass": Frozen,
    "slots": Slotted,
    "object": lambda x: SimpleNamespace(x=x),
    "nested": lambda x: [{"a": (1, [Frozen(Pair(2, {"b": x}))])}],
}


def tensors(value: Any) -> list[torch.Tensor]:
    """Return all tensors in these containers."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (OrderedDict, UserDict, MappingProxyType, dict)):
        return [t for part in value.values() for t in tensors(part)]
    if isinstance(value, (list, tuple)):
        return [t for part in value for t in tensors(part)]
    return tensors(value.x) if hasattr(value, "x") else []


@pytest.mark.parametrize("build", CONTAINERS.values(), ids=CONTAINERS)
def test_only_containers_with_unaligned_tensors_are_copied(build: Any) -> None:
    x = off(13)
    batch = build(x)
    made = align(batch)
    (found,) = tensors(made)
    assert address(found) == 0
    assert found.equal(x)
    assert tensors(batch)[0] is x  # the data set may use it
    assert type(made) is type(batch) or isinstance(batch, MappingProxyType)
    fit = build(torch.ones(3))
    assert align(fit) is fit


def test_shared_tensors_stay_shared_and_cycles_end() -> None:
    x = off(13)
    made = align({"input": x, "label": [x]})
    assert made["input"] is made["label"][0]
    around: list[Any] = [off(2)]
    around.append(around)
    assert address(align(around)[0]) == 0


def test_objects_that_are_not_data_are_not_searched() -> None:
    model = torch.nn.Linear(2, 2)
    for value in (
        None,
        3,
        "a",
        b"b",
        range(4),
        model,
        [model],
        torch.empty(0)[:0],
        torch.ones(2, device="meta"),
        np.array(["a", 1], dtype=object),
    ):
        assert align(value) is value


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.dtype([("a", "f4"), ("b", "i4")]), "M8[s]", "U3"])
def test_an_array_equals_one_from_a_worker(dtype: Any) -> None:
    table = np.zeros(240, dtype=dtype)[1:121].reshape(10, 12)
    for a in (table, table.T, table[:, ::2], np.asfortranarray(table)):
        made = align([a])[0]
        assert address(made) == 0
        assert (made == a).all()
        fortran = a.flags.f_contiguous and not a.flags.c_contiguous
        assert made.flags.f_contiguous if fortran else made.flags.c_contiguous
        assert align(made) is made


def test_parameters_are_aligned_and_stay_the_same_objects() -> None:
    flat = torch.randn(200)
    weight, bias = torch.nn.Parameter(flat[1:40].view(3, 13)), torch.nn.Parameter(flat[41:44])
    buffer, fit = flat[50:60][1:], torch.randn(3, 4)
    values, at = [t.detach().clone() for t in (weight, bias, buffer)], fit.data_ptr()
    held = torch.optim.SGD([weight, bias], lr=0.1)
    align_([weight, bias, buffer, fit, weight, torch.empty(0), torch.empty(3, device="meta")])
    assert [address(t) for t in (weight, bias, buffer, fit)] == [0, 0, 0, 0]
    assert fit.data_ptr() == at
    assert all(t.equal(value) for t, value in zip((weight, bias, buffer), values, strict=True))
    assert held.param_groups[0]["params"][0] is weight
    assert weight.requires_grad
    assert flat[1:40].data_ptr() != weight.data_ptr()


def test_parameters_that_share_memory_are_not_moved() -> None:
    flat = torch.nn.Parameter(torch.randn(100)[1:])
    part = torch.nn.Parameter(flat.detach()[3:20])
    align_([flat, part])
    with torch.no_grad():
        flat.zero_()
    assert part.count_nonzero() == 0
