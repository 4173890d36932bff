"""Is what the processes train the same on all of them? It may not be where they have unlike devices, or in its modes.

Processes that make layers in the order of a set have them in another order each, and would add up gradients of unlike
layers. So names, shapes and order are compared when a model is placed, and again before the first step.

Gradients travel as rows of bytes, as they lie in memory. A script that looks at its device before it builds its model
(channels_last on a GPU only, half the precision there, a layer that is left on the processor) makes rows that are
unlike, and their sum is no gradient. Nobody would see it later: weights, which differ anyway, are not compared there.

Nor would anybody see `model.eval()` under `if run.is_main:` with no `train()` after it: weights stay the same on all
processes, but are made without dropout on some. So a number of all layers' modes goes along with every step.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from functools import partial
from operator import attrgetter

import torch

from unisono.distributed.process_group import ProcessGroup
from unisono.errors import LoopError


def check_same_parameters(
    group: ProcessGroup, tensors: Iterable[tuple[str, torch.Tensor]], asked: str, home: torch.device | None = None
) -> None:
    """Have these the same names, in the same order, and the same form on all processes? Raises LoopError on all of
    them if not. Every process calls it.

    home  where they should lie, in a mixed group
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
            f"{asked}, in {group.size} processes.",
            f"Its parameters {'have another order' if ordered else 'are others'} on each: {here} on rank 0, and "
            f"{there} on rank {rank}.",
            "make layers in a fixed order: for name in sorted(names), since a set of texts has another order in every "
            "process."
            if ordered
            else "build the same on every process: names, shapes, precision, and what trains.",
        )
    raise LoopError(
        f"{asked}, on unlike devices.",
        f"The model is another one on each: {here} on rank 0, and {there} on rank {rank}.",
        "build the same on every process, whatever its device: shapes, precision, memory format, and what trains.",
    )


def _kind(tensor: torch.Tensor) -> str:
    """What it is, wherever it lies, in words."""
    words = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    return words if tensor.requires_grad else f"{words}, not trained"


def _form(tensor: torch.Tensor, home: torch.device | None) -> str:
    """As it lies in memory, in words."""
    lies = torch.empty_like(tensor, device="meta").stride()  # without what it leaves out
    words = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} with strides {tuple(lies)}"
    words += "" if tensor.requires_grad else ", not trained"
    return words if home is None or tensor.device == home else f"{words}, on another device than the run's"


class ModeCheck:
    """Which layers of these models are in training mode, and which are not."""

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self._layers = [(name, layer) for model in models for name, layer in model.named_modules()]
        self._modes = [layer for _, layer in self._layers]

    def number(self) -> int:
        """20 bits that tell them."""
        return zlib.crc32(bytes(map(attrgetter("training"), self._modes))) >> 12

    def refuse(self, group: ProcessGroup, *, computed: bool) -> None:
        """Raises LoopError on every process, and names the first layer that is not the same. Every process calls it.
        `computed`: did this one compute something? Who did not may not have come to a `model.train()` in the rounds."""
        found = group.all_gather_object([layer.training for layer in self._modes] if computed else None)
        those = [rank for rank, modes in enumerate(found) if modes is not None]
        for number, (name, layer) in enumerate(self._layers):
            ranks = [rank for rank in those if not found[rank][number]]
            if 0 < len(ranks) < len(those):
                who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
                what = f"{name or 'The model'} ({type(layer).__name__})"
                raise LoopError(
                    "A step was computed with layers in other modes on other processes.",
                    f"{what} is in evaluation mode on {who} of {group.size}, and in training mode elsewhere.",
                    "call model.train() wherever model.eval() was called; or use run.evaluate, which does both.",
                )
