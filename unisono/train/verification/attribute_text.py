"""The Python attributes of placed modules as text, which two processes or two moments can compare."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from unisono.train.modules.attribute_snapshot import MARKS
from unisono.train.modules.module_attributes import Key

OF_TORCH = frozenset(vars(torch.nn.Module())) | {"training"}
"""Attributes that every module has."""

PLAIN = (int, float, str, bool, type(None))


def attributes_of(models: Iterable[torch.nn.Module]) -> dict[str, str]:
    """Return {module.attribute: value as text} of plain values, of the lengths of containers and of tensors' shapes."""
    found = {}
    for model in models:
        for prefix, part in model.named_modules():
            attributes = object.__getattribute__(part, "__dict__")  # an observed module does not record this read
            for name, value in attributes.items():
                if name not in OF_TORCH and not name.startswith(MARKS) and (shown := _shown(value)) is not None:
                    found[f"{prefix or type(model).__name__}.{name}"] = shown
    return found


def names_of(keys: Iterable[Key], models: Sequence[torch.nn.Module]) -> list[str]:
    """Return the names that `attributes_of` gives these attributes."""
    found = []
    for place, attribute in sorted(keys):
        model, _, module = place.partition("/")
        found.append(f"{module or type(models[int(model)]).__name__}.{attribute}")
    return found


def first_change(one: Mapping[str, str], other: Mapping[str, str], without: Collection[str]) -> str:
    """Return the first attribute that differs, with both values; "" if none does. Ignore the names in `without`."""
    for name in sorted({*one, *other} - {*without}):
        if one.get(name) != other.get(name):
            return f"{name} ({one.get(name, 'absent')} and {other.get(name, 'absent')})"
    return ""


def _shown(value: Any) -> str | None:
    if isinstance(value, PLAIN):
        return repr(value)[:80]
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, (list, tuple, dict, set)):
        return f"{type(value).__name__} of {len(value)}"
    return None
