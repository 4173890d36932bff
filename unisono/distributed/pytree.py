"""Trees of tensors: a tensor, or a dict by name, a list or a tuple of trees. `Collectives` accepts and returns them.

The *form* of a tree is JSON: its structure, and the dtype and shape of each tensor. Ranks compare and send forms.

torch.utils._pytree is not used here, for three reasons. It keeps the insertion order of dicts, and ranks may have
inserted the same names in different orders; here names are sorted, so that the same tensors are combined. It cannot
serialize the structure of a named tuple whose class is not registered. And it treats a subclass of dict or list as a
leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from unisono.distributed.process_group import is_dtensor
from unisono.tensors.spec import TensorSpec, as_bytes, dtype_name

Tree = Any
Form = Any
"""{"kind": "float32", "shape": [2, 3]}, {"dict": [[name, form], ...]}, {"list": [form, ...]}, {"tuple": [form, ...]};
or {"wrong": [fact, remedy]} for a value that is none of these."""


def leaves(tree: Tree) -> list[torch.Tensor]:
    """Return the tensors of a tree in the order of sorted names, without their graphs."""
    if isinstance(tree, torch.Tensor):
        return [tree.detach()]
    parts = [tree[name] for name in sorted(tree)] if isinstance(tree, dict) else tree
    return [leaf for part in parts for leaf in leaves(part)]


def form_of(tree: Tree) -> Form:
    """Return the form of a tree."""
    if isinstance(tree, torch.Tensor):
        if is_dtensor(tree):
            return invalid_form("It takes whole tensors, and one is a DTensor.", "tensor.full_tensor()")
        if tree.layout is not torch.strided:
            return invalid_form(f"It takes dense tensors, and one is {tree.layout}.", "tensor.to_dense()")
        return {"kind": dtype_name(tree.dtype), "shape": list(tree.shape)}
    if isinstance(tree, dict):
        if not all(isinstance(name, str) for name in tree):
            return invalid_form(
                "It takes dicts by name, and one has a key that is no string.", "{str(key): value, ...}"
            )
        return {"dict": [[name, form_of(tree[name])] for name in sorted(tree)]}
    if isinstance(tree, (list, tuple)):
        return {"tuple" if isinstance(tree, tuple) else "list": [form_of(part) for part in tree]}
    fact = f"It takes tensors, and dicts, lists and tuples of them; one thing is a {type(tree).__name__}."
    return invalid_form(fact, "torch.tensor(value); or a verb for objects: all_gather_object, broadcast_object")


def invalid_form(fact: str, remedy: str) -> Form:
    """Return the form that replaces an invalid value."""
    return {"wrong": [fact, remedy]}


def first_error(form: Any) -> Sequence[str] | None:
    """Return (fact, remedy) of the first invalid value in a form or a list of forms, or None."""
    if isinstance(form, dict) and "wrong" in form:
        return list(form["wrong"])
    parts = list(form.values()) if isinstance(form, dict) else form if isinstance(form, list) else []
    return next((found for part in parts if (found := first_error(part))), None)


def tensors_of(form: Form) -> list[Form]:
    """Return the forms of the tensors, in the order of `leaves`."""
    if "kind" in form:
        return [form]
    parts = [part for _, part in form["dict"]] if "dict" in form else [part for some in form.values() for part in some]
    return [leaf for part in parts for leaf in tensors_of(part)]


def build(form: Form, found: Iterator[torch.Tensor], like: Tree = None) -> Tree:
    """Return a tree of this form from its tensors.

    Args:
        form: The form.
        found: The tensors, in the order of `leaves`.
        like: A tree of the same structure. The result gets its named tuples and its order of names.
    """
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
    """Yield the differences of two forms, or lists of them: (path, text of the one, text of the other)."""
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
    """Return a short text of a form: "float32 [2, 3]"."""
    if not isinstance(form, dict):
        return f"a list of {len(form)}" if isinstance(form, list) else str(form)
    if "kind" in form:
        return f"{form['kind']} {form['shape']}"
    if "wrong" in form:
        return str(form["wrong"][0])
    ((kind, some),) = form.items()
    return f"a {kind} of {len(some)}"


# -- as bytes, because no back end supports every dtype (gloo: bool, int16, float8)


def pack(tree: Tree, device: torch.device) -> torch.Tensor:
    """Return the bytes of all tensors, one after another."""
    parts = [as_bytes(leaf).to(device) for leaf in leaves(tree)]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=device)


def size_of(form: Form) -> int:
    """Return the number of bytes of `pack`."""
    return sum(spec.nbytes for spec in _specs(form))


def unpack(row: torch.Tensor, form: Form, like: Tree = None) -> Tree:
    """Return the tree of this form that is packed in a row of bytes, on the devices of the tensors of `like`."""
    specs = _specs(form)
    parts = row.split([spec.nbytes for spec in specs]) if specs else ()
    # cloned, because torch views bytes as a wider dtype only from an aligned address on
    found = [part.clone().view(spec.torch_dtype).view(spec.shape) for part, spec in zip(parts, specs, strict=True)]
    if like is not None:
        found = [leaf.to(mine.device) for leaf, mine in zip(found, leaves(like), strict=True)]
    return build(form, iter(found), like)


def _specs(form: Form) -> list[TensorSpec]:
    return [TensorSpec(leaf["kind"], tuple(leaf["shape"])) for leaf in tensors_of(form)]


# -- as one row for each dtype, to be reduced


def rows_by_kind(tree: Tree, device: torch.device) -> dict[torch.dtype, torch.Tensor]:
    """Return copies of all tensors, flat and concatenated by dtype."""
    found = leaves(tree)
    return {
        kind: torch.cat([leaf.reshape(-1).to(device) for leaf in found if leaf.dtype == kind])
        for kind in dict.fromkeys(leaf.dtype for leaf in found)
    }


def from_rows(like: Tree, rows: dict[torch.dtype, torch.Tensor]) -> Tree:
    """Return a tree of the structure of `like` from rows by dtype."""
    found, places = [], dict.fromkeys(rows, 0)
    for leaf in leaves(like):
        start = places[leaf.dtype]
        places[leaf.dtype] = start + leaf.numel()
        found.append(rows[leaf.dtype][start : start + leaf.numel()].view(leaf.shape).to(leaf.device))
    return build(form_of(like), iter(found), like)


def map_rows(tree: Tree, device: torch.device, function: Callable[[torch.Tensor], torch.Tensor]) -> Tree:
    """Apply `function` to the row of each dtype, and return the tree of the results. Empty rows are left out."""
    rows = rows_by_kind(tree, device)
    return from_rows(tree, {kind: function(row) if len(row) else row for kind, row in rows.items()})
