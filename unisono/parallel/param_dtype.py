"""Casts: layers compute with parameters in bfloat16, while float32 ones are kept, trained and saved.

This is FSDP2's mixed precision (MixedPrecisionPolicy in
https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html): a layer's parameters are cast before they are
gathered, so half the bytes travel and half the memory is gathered, its inputs are cast to fit them, and gradients are
added up in float32. Autocast (precision.py) decides operator by operator; here all within a layer is bfloat16.

    float32 master --cast--> bfloat16 parameter, for one call of a layer --> its gradient, bfloat16
          ^                                                                       |
          +---- update <---- sum over micro-batches, in float32 <------ cast -----+

Where they are gathered layer by layer FSDP2 makes the first cast, and the exchange takes the gradient from it. Where
they are whole (one process, replicas, gathered for a step) the cast is an operation of autograd's, made here. Both have
the same bits: what several uses in one call give is added up in bfloat16, and all beyond that in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_map_only

from unisono.distributed.process_group import is_dtensor
from unisono.errors import LoopError
from unisono.parallel.layers import ForwardWrapper, layers_of, outermost, untied
from unisono.parallel.precision import DTYPES, as_float32

if TYPE_CHECKING:
    from unisono.config import ParallelSettings

Slot = tuple[nn.Module, str]
"""Where a parameter is found: a module, and the parameter's name in it. One that is tied has several."""


def apply_param_dtype(model: nn.Module, parallel: ParallelSettings) -> None:
    """From now on the layers of a model compute in `parallel.param_dtype`, and it returns floating tensors as float32.

    Raises LoopError for what cannot be computed so.
    """
    _refuse(model)
    dtype = DTYPES[parallel.param_dtype]
    layers = layers_of(model, parallel.layer_classes)
    alone = untied(model, [layer for layer in outermost(model, parallel.layer_classes) if layer is not model])
    within = {slot for layer in alone for slot in slots_of(layer)}
    slots = {layer: slots_of(layer) for layer in layers}
    slots[model] = [slot for slot in slots_of(model) if slot not in within]
    tied: dict[Slot, torch.Tensor | None] = dict.fromkeys(
        slot for layer in layers for slot in slots[layer] if slot not in within
    )
    for layer in [*layers, model]:
        layer.forward = CastForward(layer, slots[layer], dtype, tied, last=layer is model)


def slots_of(module: nn.Module) -> list[Slot]:
    """Every place of a floating parameter in a module."""
    return [
        (part, name)
        for part in module.modules()
        for name, p in part._parameters.items()
        if p is not None and p.is_floating_point()
    ]


class CastForward(ForwardWrapper):
    """The forward of a layer, with its inputs and parameters cast.

    The model's call casts what is in no layer, or in several; that of a layer all in it that nobody around it has cast.
    A layer that is computed again in backward (activation_checkpoint.py) finds what it shares with others uncast, since
    the model's call is long over; it takes that from `tied`, without an operation that was not there the first time.

    last  is this the model itself, whose outputs are for the loop?
    """

    def __init__(
        self,
        module: nn.Module,
        slots: Sequence[Slot],
        dtype: torch.dtype,
        tied: dict[Slot, torch.Tensor | None],
        *,
        last: bool,
    ) -> None:
        super().__init__(module)
        self.slots, self.dtype, self.tied, self.last = slots, dtype, tied, last

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, self._low, (args, kwargs))
        held = self._lay()
        try:
            out = self.forward(*args, **kwargs)
        finally:
            for (part, name), p in held:
                part._parameters[name] = p
        return tree_map_only(torch.Tensor, as_float32, out) if self.last else out

    def _lay(self) -> list[tuple[Slot, nn.Parameter]]:
        """Put what to compute with where the parameters are. Returns what was there."""
        held, cast = [], {}
        in_backward = torch._C._current_graph_task_id() != -1  # so this call is the second one of the same layer
        for slot in self.slots:
            part, name = slot
            p = part._parameters[name]
            assert p is not None
            again = self.tied.get(slot) if in_backward and isinstance(p, nn.Parameter) else None
            if p not in cast:
                cast[p] = again if again is not None else self._low(p)
            if cast[p] is not p:
                if cast[p].requires_grad and is_dtensor(p) and again is None:
                    cast[p].register_hook(partial(_added_up, p.placements))  # type: ignore[attr-defined]
                held.append((slot, p))
                part._parameters[name] = cast[p]  # type: ignore[assignment]  # its gradient goes on to the parameter
                if self.last and slot in self.tied and torch.is_grad_enabled():
                    self.tied[slot] = cast[p].detach().requires_grad_(cast[p].requires_grad)
        return held

    def _low(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor


def _added_up(placements: Any, gradient: Any) -> Any:
    """A gradient of which each process of the axis `tensor` has a summand becomes the sum, in bfloat16: where FSDP2
    has made the cast it adds up so as well, before it hands on a float32."""
    return gradient.redistribute(placements=placements) if gradient.placements != placements else gradient


def _refuse(model: nn.Module) -> None:
    """What torch cannot compute in bfloat16 beside float32 buffers, or what keeps its weights in a second place."""
    asked = f"run.place was given a {type(model).__name__}, to compute with --set parallel.param_dtype=bf16."
    for name, part in model.named_modules():
        called = f"{name or 'It'} is a {type(part).__name__}"
        if isinstance(part, _NormBase) and part.running_mean is not None:
            true = f"{called}, whose running statistics are float32: torch wants its weights to be so as well."
            raise LoopError(asked, true, "--set precision=bf16 --set parallel.param_dtype=fp32, or GroupNorm.")
        if _normed(part):
            true = f"{called} with a spectral norm, whose vectors stay float32 beside its bfloat16 weight."
            raise LoopError(asked, true, "--set precision=bf16 --set parallel.param_dtype=fp32.")
        if isinstance(part, nn.RNNBase):
            true = f"{called}, which keeps a list of its weights that nobody else may change."
            raise LoopError(asked, true, "--set precision=bf16 --set parallel.param_dtype=fp32.")
    for name, p in model.named_parameters():
        if p.is_floating_point() and p.dtype != torch.float32:
            true = f"{name} is {p.dtype}; what is trained and saved is to be float32, of which bfloat16 is made."
            raise LoopError(asked, true, "model.float() before it is placed, or --set parallel.param_dtype=fp32.")


def _normed(part: nn.Module) -> bool:
    """Is a weight of it divided by its largest singular value, in either of torch's ways?"""
    steps = [step for row in getattr(part, "parametrizations", {}).values() for step in row]
    return any(
        type(step).__name__ in ("_SpectralNorm", "SpectralNorm") for step in [*steps, *part._forward_pre_hooks.values()]
    )
