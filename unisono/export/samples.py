"""The inputs and outputs of a model on samples, as files: to compare a program that another process has loaded.

    samples.safetensors     every tensor, by a number
    samples.json            [{"args": ..., "kwargs": ..., "outputs": ...}, ...], with {"tensor": "3"} for each tensor

load_again.py reads them without this library.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch.utils._pytree import tree_leaves, tree_map_only

from unisono.errors import LoopError

PLAIN = (bool, int, float, str, type(None))


class ModelCall(NamedTuple):
    """The inputs of a call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def samples(self) -> int:
        """Return the size that the first dim of all tensors has; 0 if they differ."""
        sizes = {len(leaf) if leaf.dim() else 0 for leaf in tree_leaves(tuple(self)) if isinstance(leaf, torch.Tensor)}
        return sizes.pop() if len(sizes) == 1 else 0

    def without(self, name: str) -> ModelCall:
        """Return a call without a keyword argument."""
        return ModelCall(self.args, {key: value for key, value in self.kwargs.items() if key != name})

    def first(self, count: int) -> ModelCall:
        """Return a call with the first samples only."""
        return ModelCall(*tree_map_only(torch.Tensor, lambda tensor: tensor[:count].contiguous(), tuple(self)))

    def twice(self) -> ModelCall:
        """Return a call with every sample twice."""
        return ModelCall(*tree_map_only(torch.Tensor, lambda tensor: torch.cat((tensor, tensor)), tuple(self)))


class PlainOutputs(torch.nn.Module):
    """A model of transformers whose outputs are a dict of tensors, in place of a class of that package.

    Args:
        model: The model. Its labels should not be given: then there is no loss in the outputs.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self.forward = _plain_forward(model)


def _plain_forward(model: torch.nn.Module) -> Callable[..., Any]:
    """Return a function that calls a model. inspect.signature returns the model's own, which torch.export needs."""

    @functools.wraps(model.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return without_cache(model(*args, **kwargs))

    return forward


def returns_its_own_class(model: torch.nn.Module) -> bool:
    """Return whether a model is of transformers, so that it may return classes of that package."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def without_cache(outputs: Any) -> Any:
    """Return the outputs of a model of transformers as a dict without the cache of attention; others as they are."""
    if isinstance(outputs, Mapping):
        return {str(name): value for name, value in outputs.items() if name != "past_key_values"}
    return outputs


def write_samples(folder: Path, model: torch.nn.Module, calls: Sequence[ModelCall]) -> list[torch.Tensor]:
    """Call the model, write inputs and outputs, and return all tensors of the outputs.

    Raises:
        LoopError: Inputs or outputs contain something else than tensors, plain values, lists, tuples and dicts.
    """
    tensors: dict[str, torch.Tensor] = {}
    rows, found = [], []
    for call in calls:
        with torch.no_grad():
            outputs = without_cache(model(*call.args, **call.kwargs))
        found += [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
        parts = {"args": call.args, "kwargs": call.kwargs, "outputs": outputs}
        rows.append({name: _form(value, tensors, name) for name, value in parts.items()})
    save_file(tensors, folder / "samples.safetensors")
    (folder / "samples.json").write_text(json.dumps(rows), encoding="utf-8")
    return found


def largest_relative(expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> float:
    """Return the largest norm of a difference, relative to the norm of the expected tensor."""
    pairs = [(a.double(), b.double()) for a, b in zip(expected, found, strict=True) if a.numel()]
    return max((float((b - a).norm() / a.norm().clamp(min=1e-30)) for a, b in pairs), default=0.0)


def _form(value: Any, tensors: dict[str, torch.Tensor], what: str) -> Any:
    if isinstance(value, torch.Tensor):
        tensors[str(len(tensors))] = value.detach().cpu().contiguous().clone()
        return {"tensor": str(len(tensors) - 1)}
    if isinstance(value, Mapping):  # outputs of transformers' models are mappings
        return {"dict": {str(name): _form(item, tensors, what) for name, item in value.items()}}
    if isinstance(value, (list, tuple)):
        return {"list" if isinstance(value, list) else "tuple": [_form(item, tensors, what) for item in value]}
    if isinstance(value, PLAIN):
        return {"value": value}
    raise LoopError(
        f"The model's {what} contain a {type(value).__name__}.",
        "A program takes and returns tensors, plain values, lists, tuples and dicts.",
        "export the weights: --format safetensors",
    )
