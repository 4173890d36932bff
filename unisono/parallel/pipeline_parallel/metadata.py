"""What stages tell each other beside tensors: which modules were called, and what each gave, but for what was in it."""

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
"""What a module may return beside tensors."""


class StageMessage(NamedTuple):
    """What one call of a link gave: its number, the structure, and of each leaf what it is like, or, if it is a plain
    thing, that."""

    link: int
    spec: str
    leaves: tuple[Any, ...]


class ReceivedMetadata(NamedTuple):
    """What a stage is told of those before it: what was called, and the link that comes next."""

    to: int
    gave: tuple[StageMessage, ...]


def gave(number: int, name: str, output: Any) -> StageMessage:
    """What a call gave, in words that can travel."""
    leaves, spec = tree_flatten(output)
    found: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            found.append(TensorSpec(dtype_name(leaf.dtype), tuple(leaf.shape)))
        elif isinstance(leaf, PLAIN):
            found.append(leaf)
        else:
            raise LoopError(
                f"{name} was called, in a stage of a pipeline.",
                f"It returned a {type(leaf).__name__}: only tensors and plain values can be told to later stages.",
                "let it return tensors (Hugging Face: model.config.use_cache = False), or --set parallel.pipeline=1",
            )
    return StageMessage(number, treespec_dumps(spec), tuple(found))


def encoded(told: ReceivedMetadata) -> torch.Tensor:
    """As bytes."""
    rows = [
        (g.link, g.spec, [leaf if isinstance(leaf, TensorSpec) else {"is": leaf} for leaf in g.leaves])
        for g in told.gave
    ]
    text = json.dumps((told.to, rows), separators=(",", ":")).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def decoded(tensor: torch.Tensor) -> ReceivedMetadata:
    """What these bytes say."""
    return _decoded(tensor.cpu().numpy().tobytes())


@lru_cache(maxsize=256)  # it is the same for all micro-batches of a kind
def _decoded(text: bytes) -> ReceivedMetadata:
    to, rows = json.loads(text)
    return ReceivedMetadata(
        to, tuple(StageMessage(link, spec, tuple(map(_leaf, leaves))) for link, spec, leaves in rows)
    )


def _leaf(told: Any) -> Any:
    return told["is"] if isinstance(told, Mapping) else TensorSpec.from_json(told)
