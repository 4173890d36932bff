"""Trees of tensors: a tensor; or a dict by name, a list or a tuple of trees. What process_group.py does to one tensor,
collectives.py does to them.

A tree's *form* is what JSON can say of it: how it branches, and the kind and shape of each tensor. Names are taken in
their order, whoever wrote a dict in which, so that the same tensors lie in the same places on every process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import torch

from unisono.distributed.process_group import is_dtensor

Tree = Any
Form = Any
"""{"kind": "float32", "shape": [2, 3]}, {"dict": [[name, form], ...]}, {"list": [form, ...]}, {"tuple": [form, ...]};
or {"wrong": [what is true, what to type]} in place of something that is none of these."""


def leaves(tree: Tree) -> list[torch.Tensor]:
    """The tensors of a tree, without their graphs."""
    if isinstance(tree, torch.Tensor):
        return [tree.detach()]
    parts = [tree[name] for name in sorted(tree)] if isinstance(tree, dict) else tree
    return [leaf for part in parts for leaf in leaves(part)]


def form_of(tree: Tree) -> Form:
    if isinstance(tree, torch.Tensor):
        if is_dtensor(tree):
            return invalid_form(
                "It takes whole tensors, and a DTensor lies over several processes.", "tensor.full_tensor()"
            )
        if tree.layout is not torch.strided:
            return invalid_form(f"It takes dense tensors, and one is {tree.layout}.", "tensor.to_dense()")
        return {"kind": str(tree.dtype).removeprefix("torch."), "shape": list(tree.shape)}
    if isinstance(tree, dict):
        if not all(isinstance(name, str) for name in tree):
            return invalid_form(
                "It takes dicts by name, and one has a key that is no string.", "{str(key): value, ...}"
            )
        return {"dict": [[name, form_of(tree[name])] for name in sorted(tree)]}
    if isinstance(tree, (list, tuple)):
        return {"tuple" if isinstance(tree, tuple) else "list": [form_of(part) for part in tree]}
    true = f"It takes tensors, and dicts, lists and tuples of them; one thing is a {type(tree).__name__}."
    return invalid_form(true, "torch.tensor(value); or a verb for objects: all_gather_object, broadcast_object")


def invalid_form(true: str, do: str) -> Form:
    return {"wrong": [true, do]}


def first_error(said: Any) -> Sequence[str] | None:
    """(what is true, what to type) of the first thing in there that is wrong."""
    if isinstance(said, dict) and "wrong" in said:
        return list(said["wrong"])
    parts = list(said.values()) if isinstance(said, dict) else said if isinstance(said, list) else []
    return next((found for part in parts if (found := first_error(part))), None)


def tensors_of(form: Form) -> list[Form]:
    """What a form says of its tensors, in the order of `leaves`."""
    if "kind" in form:
        return [form]
    parts = [part for _, part in form["dict"]] if "dict" in form else [part for some in form.values() for part in some]
    return [leaf for part in parts for leaf in tensors_of(part)]


def build(form: Form, found: Iterator[torch.Tensor], like: Tree = None) -> Tree:
    """The tree of this form with these tensors; named tuples, and the order of names, are those of `like`."""
    if "kind" in form:
        return next(found)
    if "dict" in form:
        parts = {name: build(part, found, like and like[name]) for name, part in form["dict"]}
        return {name: parts[name] for name in like or parts}
    ((kind, some),) = form.items()
    built = [build(part, found, like and like[i]) for i, part in enumerate(some)]
    if kind == "list":
        return built
    return type(like)(*built) if hasattr(like, "_fields") else tuple(built)


def differences(one: Any, other: Any, name: str = "") -> Iterator[tuple[str, str, str]]:
    """Where two forms, or lists of them, differ: (name, what it is in the one, what it is in the other)."""
    if one == other:
        return
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for i, pair in enumerate(zip(one, other, strict=True)):
            yield from differences(*pair, f"{name}[{i}]")
    elif isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys() and "kind" not in one:
        if "dict" in one:
            names, others = dict(one["dict"]), dict(other["dict"])
            for key in [*names, *(key for key in others if key not in names)]:
                yield from differences(names.get(key, "nothing"), others.get(key, "nothing"), f"{name}[{key!r}]")
        else:
            for kind in one:
                yield from differences(one[kind], other[kind], name)
    else:
        yield name, describe(one), describe(other)


def describe(form: Any) -> str:
    """In few words: float32 [2, 3]."""
    if not isinstance(form, dict):
        return f"a list of {len(form)}" if isinstance(form, list) else str(form)
    if "kind" in form:
        return f"{form['kind']} {form['shape']}"
    if "wrong" in form:
        return str(form["wrong"][0])
    ((kind, some),) = form.items()
    return f"a {kind} of {len(some)}"


# -- as bytes, since a back end does not know every kind of number (gloo: bool, int16, float8)


def pack(tree: Tree, device: torch.device) -> torch.Tensor:
    """All its tensors, one after the other, as bytes."""
    parts = [leaf.reshape(-1).contiguous().to(device).view(torch.uint8) for leaf in leaves(tree)]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=device)


def size_of(form: Form) -> int:
    """Bytes of `pack`."""
    return sum(_bytes(leaf) for leaf in tensors_of(form))


def unpack(row: torch.Tensor, form: Form, like: Tree = None) -> Tree:
    """The tree of this form that is packed in a row of bytes, on the devices of `like`'s tensors."""
    told = tensors_of(form)
    parts = row.split([_bytes(leaf) for leaf in told]) if told else ()
    # a copy begins where memory does, and only there a number may be of eight bytes
    found = [part.clone().view(_kind(leaf)).view(leaf["shape"]) for part, leaf in zip(parts, told, strict=True)]
    if like is not None:
        found = [leaf.to(mine.device) for leaf, mine in zip(found, leaves(like), strict=True)]
    return build(form, iter(found), like)


def _kind(leaf: Form) -> torch.dtype:
    kind: torch.dtype = getattr(torch, leaf["kind"])
    return kind


def _bytes(leaf: Form) -> int:
    return int(prod(leaf["shape"])) * _kind(leaf).itemsize


# -- as one row for each kind of number, to be added up


def rows_by_kind(tree: Tree, device: torch.device) -> dict[torch.dtype, torch.Tensor]:
    """{kind: all tensors of that kind, one after the other, in memory of their own}."""
    found = leaves(tree)
    return {
        kind: torch.cat([leaf.reshape(-1).to(device) for leaf in found if leaf.dtype == kind])
        for kind in dict.fromkeys(leaf.dtype for leaf in found)
    }


def from_rows(like: Tree, rows: dict[torch.dtype, torch.Tensor]) -> Tree:
    """A tree like this one, out of such rows."""
    found, places = [], dict.fromkeys(rows, 0)
    for leaf in leaves(like):
        start = places[leaf.dtype]
        places[leaf.dtype] = start + leaf.numel()
        found.append(rows[leaf.dtype][start : start + leaf.numel()].view(leaf.shape).to(leaf.device))
    return build(form_of(like), iter(found), like)


def map_rows(tree: Tree, device: torch.device, make: Callable[[torch.Tensor], torch.Tensor]) -> Tree:
    """The tree that `make` makes of its rows, kind by kind; rows without an element are left out."""
    rows = rows_by_kind(tree, device)
    return from_rows(tree, {kind: make(row) if len(row) else row for kind, row in rows.items()})
