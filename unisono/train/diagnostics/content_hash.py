"""Digests of content: equal for two batches of the same values, whatever they are made of and wherever they are."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from unisono.train.diagnostics.tensor_hash import raw_bytes

DEEPEST = 8
"""Levels of nested objects that are looked into."""

PLAIN = (int, float, complex, str, bytes, bool, type(None))


def content_digest(value: Any) -> str:
    """Return a digest of the bits of tensors and arrays, and of plain values, at any depth.

    Of an object of another class its attributes count, or else its class alone: its address differs everywhere.
    """
    found = hashlib.blake2b(digest_size=12)
    _feed(found, value, 0)
    return found.hexdigest()


def _feed(found: Any, value: Any, depth: int) -> None:
    if isinstance(value, torch.Tensor):
        dense = value.detach().to_dense() if value.layout is not torch.strided else value.detach()
        found.update(f"{dense.dtype}{tuple(dense.shape)}".encode())
        if dense.numel():
            found.update(raw_bytes(dense.cpu()).numpy())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            found.update(repr(key).encode())
            _feed(found, item, depth + 1)
    elif isinstance(value, (list, tuple)):
        found.update(f"{len(value)} of".encode())
        for item in value:
            _feed(found, item, depth + 1)
    elif isinstance(value, (*PLAIN, range)):
        found.update(repr(value).encode())
    elif isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        found.update(f"{value.dtype}{value.shape}".encode())
        found.update(value.tobytes())
    else:
        found.update(type(value).__qualname__.encode())
        if depth < DEEPEST and hasattr(value, "__dict__"):
            _feed(found, vars(value), depth + 1)
