"""Check that all processes train the same parameters, with layers in the same modes.

Processes that build layers in the order of a set have them in different orders, and would add gradients of different
layers. So names, shapes and order are compared when a model is placed, and again before the first step.

Gradients are exchanged as bytes, in the order of memory. A script that builds its model by its device (channels_last or
half the precision on a GPU only, a layer that is left on the CPU) has gradients of different layouts, and their sum is
no gradient. With different devices no later check finds this: weights differ in any case, and are not compared.

Nor does a comparison of weights find `model.eval()` under `if run.is_main:` without a `train()` after it: weights stay
equal, but some processes compute without dropout. So a hash of the modes of all layers is exchanged in every step.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from unisono.checkpoint.safetensors_reader import LazyTensor
from unisono.config import plural
from unisono.distributed.process_group import ProcessGroup
from unisono.errors import CheckpointError, LoopError
from unisono.tensors.digest import content_digest

SAMPLED = 1024
"""Elements at the beginning of a tensor that are compared, of the last dim of its first row."""


def check_same_parameters(
    group: ProcessGroup, tensors: Iterable[tuple[str, torch.Tensor]], verb: str, home: torch.device | None = None
) -> None:
    """Check that these tensors have the same names, order and form on all processes. Every process calls this.

    Args:
        group: the processes.
        tensors: the parameters of this process, by name.
        verb: the function that the script called, for the message.
        home: the device of the tensors, in a group of different devices.

    Raises:
        LoopError: they differ; on every process.
    """
    if group.size == 1:
        return
    form = partial(_form, home=home) if group.mixed else _kind
    mine = [(name, form(tensor)) for name, tensor in tensors]
    if len(set(group.all_gather_object(zlib.crc32(json.dumps(mine).encode())))) == 1:
        return
    first, *others = group.all_gather_object(mine)
    rank, other = next((r, found) for r, found in enumerate(others, 1) if found != first)
    for one, two in zip(first, other, strict=False):
        if one != two:
            here, there = (f"{name} is {form}" for name, form in (one, two))
            break
    else:
        here, there = (f"there are {len(found)} parameters" for found in (first, other))
    if not group.mixed:
        ordered = sorted(first) == sorted(other)
        raise LoopError(
            f"The {group.size} processes have different parameters in {verb}.",
            f"The parameters {'have another order' if ordered else 'are others'} on each: {here} on rank 0, and "
            f"{there} on rank {rank}.",
            "create layers in a fixed order: for name in sorted(names), since a set of texts has another order in "
            "every process."
            if ordered
            else "build the same on every process: names, shapes, precision, and what trains.",
        )
    raise LoopError(
        f"The {group.size} processes have different parameters in {verb}, on different devices.",
        f"The model is another one on each: {here} on rank 0, and {there} on rank {rank}.",
        "build the same on every process, whatever its device: shapes, precision, memory format, and what trains.",
    )


def check_same_values(group: ProcessGroup, values: Mapping[str, Any] | None) -> None:
    """Check that all processes read the same weights, from names, shapes and the first elements of each tensor.

    A file is read in parts, so no process can compare all of it. Files that differ in a tensor only after its first
    SAMPLED elements are not found here. Every process calls this.

    Args:
        group: the processes.
        values: the weights that this process reads, by name; None if it reads none.

    Raises:
        CheckpointError: the weights differ; on every process.
        LoopError: only some processes read weights; on every process.
    """
    if group.size == 1:
        return
    mine = None if values is None else {name: _sample(value) for name, value in sorted(values.items())}
    found = group.all_gather_object(mine)
    other = next((rank for rank, theirs in enumerate(found) if theirs != found[0]), None)
    if other is None:
        return
    if None in found:
        without = [f"rank {rank}" for rank, theirs in enumerate(found) if theirs is None]
        raise LoopError(
            "Only some processes pass weights to run.place.",
            f"They are None on {plural(len(without), 'process', 'processes')} of {group.size}: {', '.join(without)}.",
            "pass weights= on every process. Each process reads only its part.",
        )
    names = sorted({*found[0], *found[other]})
    name = next(name for name in names if found[0].get(name) != found[other].get(name))
    raise CheckpointError(
        "The processes read different weights in run.place.",
        f"{name} is {found[0].get(name, 'missing')} on rank 0, and {found[other].get(name, 'missing')} on rank "
        f"{other} (shape, and a digest of the first elements).",
        "copy the same files to every host, or put them on a file system that all of them share.",
    )


def _sample(value: Any) -> str:
    shape = [min(size, 1) for size in value.shape[:-1]] + [min(size, SAMPLED) for size in value.shape[-1:]]
    box = tuple(slice(0, size) for size in shape)
    first = value.box([0] * len(shape), shape) if isinstance(value, LazyTensor) else value[box]
    return f"{[*value.shape]} {content_digest(first)}"


def _kind(tensor: torch.Tensor) -> str:
    """Describe a tensor, independent of its device and strides."""
    words = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    return words if tensor.requires_grad else f"{words}, not trained"


def _form(tensor: torch.Tensor, home: torch.device | None) -> str:
    """Describe a tensor with its memory layout."""
    strides = torch.empty_like(tensor, device="meta").stride()  # those of a dense tensor in the same order
    words = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} with strides {tuple(strides)}"
    words += "" if tensor.requires_grad else ", not trained"
    return words if home is None or tensor.device == home else f"{words}, on another device than the run's"


class ModeCheck:
    """Compare which layers of these models are in training mode."""

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self._layers = [(name, layer) for model in models for name, layer in model.named_modules()]
        self._modes = [layer for _, layer in self._layers]

    def number(self) -> int:
        """Return a hash of the modes, of 20 bits."""
        return zlib.crc32(bytes(map(attrgetter("training"), self._modes))) >> 12

    def refuse(self, group: ProcessGroup, *, computed: bool) -> None:
        """Raise LoopError that names the first layer whose mode differs. Every process calls this.

        Args:
            group: the processes.
            computed: whether this process has computed something; if not, it may not have reached a `model.train()` in
                the rounds, and its modes are not compared.

        Raises:
            LoopError: on every process.
        """
        found = group.all_gather_object([layer.training for layer in self._modes] if computed else None)
        compared = [rank for rank, modes in enumerate(found) if modes is not None]
        for number, (name, layer) in enumerate(self._layers):
            ranks = [rank for rank in compared if not found[rank][number]]
            if 0 < len(ranks) < len(compared):
                where = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
                what = f"{name or 'The model'} ({type(layer).__name__})"
                raise LoopError(
                    "Layers are in different modes on different processes.",
                    f"{what} is in evaluation mode on {where} of {group.size}, and in training mode elsewhere.",
                    "call model.train() wherever model.eval() was called; or use run.evaluate, which does both.",
                )
