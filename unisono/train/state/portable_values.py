"""Values that can be sent to another process and kept in a checkpoint: plain ones, and dense tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from unisono.distributed.process_group import is_dtensor

PLAIN = (type(None), bool, int, float, str)
GROUPS = (list, tuple, set, frozenset, torch.Size)
"""Portable containers. A subclass is not portable: it would be decoded as its base class."""

DEPTH = 8


def is_portable(value: Any, depth: int = DEPTH) -> bool:
    """Return whether a value can be sent as it is, with containers nested up to `depth` levels."""
    if type(value) in PLAIN or isinstance(value, np.generic):
        return True
    if isinstance(value, torch.Tensor):
        whole = value.layout is torch.strided and not is_dtensor(value)
        return whole and type(value) is torch.Tensor and not value.is_meta
    if not depth:
        return False
    if type(value) is dict:
        return all(is_portable(each, depth - 1) for item in value.items() for each in item)
    return type(value) in GROUPS and all(is_portable(item, depth - 1) for item in value)


def copied(value: Any) -> Any:
    """Return a copy of a portable value, detached from its graph."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {key: copied(item) for key, item in value.items()}
    if type(value) in GROUPS:
        kind = tuple if isinstance(value, tuple) else type(value)
        return kind(copied(item) for item in value)
    return value
