"""Metadata that stages send with activations: which modules were called, and the structure of what each returned."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, treespec_dumps

from unisono.errors import LoopError
from unisono.tensors.spec import TensorSpec, dtype_name

PLAIN = (type(None), bool, int, float, str)
"""The types that a module may return besides tensors."""


class CallRecord(NamedTuple):
    """The result of one call of a link.

    Attributes:
        link: The number of the link.
        spec: The structure of the output, serialized.
        leaves: A TensorSpec for each tensor; other leaves as they are.
    """

    link: int
    spec: str
    leaves: tuple[Any, ...]


class StageMetadata(NamedTuple):
    """The information that a stage receives about the stages before it.

    Attributes:
        next_link: The link that is called next.
        calls: The calls of links in all earlier stages, in order.
    """

    next_link: int
    calls: tuple[CallRecord, ...]


def record_call(link: int, name: str, output: Any) -> CallRecord:
    """Return the record of a call."""
    leaves, spec = tree_flatten(output)
    found: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            found.append(TensorSpec(dtype_name(leaf.dtype), tuple(leaf.shape)))
        elif isinstance(leaf, PLAIN):
            found.append(leaf)
        else:
            raise LoopError(
                f"{name} returned a {type(leaf).__name__} in a stage of a pipeline.",
                "Later stages can get only tensors and plain values from it.",
                "let it return tensors (Hugging Face: model.config.use_cache = False), or --set parallel.pipeline=1",
            )
    return CallRecord(link, treespec_dumps(spec), tuple(found))


def encode(metadata: StageMetadata) -> torch.Tensor:
    """Encode metadata as uint8 [bytes]."""
    rows = [
        (call.link, call.spec, [leaf if isinstance(leaf, TensorSpec) else {"value": leaf} for leaf in call.leaves])
        for call in metadata.calls
    ]
    text = json.dumps((metadata.next_link, rows), separators=(",", ":")).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def decode(tensor: torch.Tensor) -> StageMetadata:
    """Decode metadata."""
    return _decode(tensor.cpu().numpy().tobytes())


@lru_cache(maxsize=256)  # it is equal for all micro-batches of a kind
def _decode(text: bytes) -> StageMetadata:
    next_link, rows = json.loads(text)
    calls = (CallRecord(link, spec, tuple(map(_decode_leaf, leaves))) for link, spec, leaves in rows)
    return StageMetadata(next_link, tuple(calls))


def _decode_leaf(leaf: Any) -> Any:
    return leaf["value"] if isinstance(leaf, Mapping) else TensorSpec.from_json(leaf)
