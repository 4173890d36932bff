"""Compute layers with parameters in bfloat16, while float32 parameters are kept, trained and saved.

This is FSDP2's mixed precision (MixedPrecisionPolicy in
https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html). A layer's parameters are cast before they are
gathered, so half the bytes are sent and half the memory is gathered. Its inputs are cast as well, and gradients are
added up in float32. Autocast (precision.py) decides operator by operator; here everything within a layer is bfloat16.

    float32 master --cast--> bfloat16 parameter, for one call of a layer --> its gradient, bfloat16
          ^                                                                       |
          +---- update <---- sum over micro-batches, in float32 <------ cast -----+

Where layers are gathered one by one, FSDP2 makes the first cast, and the exchange takes the gradient from it. Where
parameters are whole (one process, replicas, gathered for a step), the cast is an operation of autograd, made here. Both
have the same bits: gradients of several uses in one call are added in bfloat16, everything beyond that in float32.
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
from unisono.torch_compat.modules import Slot, forward_hooks_of, is_in_backward, parameter_slots

if TYPE_CHECKING:
    from unisono.config import ParallelSettings


def apply_param_dtype(model: nn.Module, parallel: ParallelSettings) -> None:
    """Let the layers of a model compute in `parallel.param_dtype`, and the model return floating tensors as float32.

    Raises:
        LoopError: A module cannot compute in this dtype.
    """
    _refuse_unsupported(model)
    dtype = DTYPES[parallel.param_dtype]
    layers = layers_of(model, parallel.layer_classes)
    untied_layers = untied(model, [layer for layer in outermost(model, parallel.layer_classes) if layer is not model])
    cast_by_layers = {slot for layer in untied_layers for slot in slots_of(layer)}
    slots = {layer: slots_of(layer) for layer in layers}
    slots[model] = [slot for slot in slots_of(model) if slot not in cast_by_layers]
    tied: dict[Slot, torch.Tensor | None] = dict.fromkeys(
        slot for layer in layers for slot in slots[layer] if slot not in cast_by_layers
    )
    for layer in [*layers, model]:
        layer.forward = CastForward(layer, slots[layer], dtype, tied, is_model=layer is model)


def slots_of(module: nn.Module) -> list[Slot]:
    """Return the slots of all floating-point parameters in a module."""
    return [
        (part, name)
        for part in module.modules()
        for name, p in parameter_slots(part).items()
        if p is not None and p.is_floating_point()
    ]


class CastForward(ForwardWrapper):
    """Run a forward with its inputs and parameters cast.

    The model's call casts the parameters that are in no layer, or in several. A layer's call casts all others in it. A
    layer that is recomputed in backward (activation_checkpoint.py) finds the shared parameters uncast, because the
    model's call is over. It takes them from `tied`, without an operation that was not in the first pass.

    Args:
        module: The layer, or the model.
        slots: The parameters to cast.
        dtype: The dtype to cast to.
        tied: The cast parameters that several layers share; filled by the model's call.
        is_model: Whether `module` is the model, whose outputs are returned to the loop.
    """

    def __init__(
        self,
        module: nn.Module,
        slots: Sequence[Slot],
        dtype: torch.dtype,
        tied: dict[Slot, torch.Tensor | None],
        *,
        is_model: bool,
    ) -> None:
        super().__init__(module)
        self.slots, self.dtype, self.tied, self.is_model = slots, dtype, tied, is_model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, self._cast, (args, kwargs))
        replaced = self._replace_parameters()
        try:
            out = self.forward(*args, **kwargs)
        finally:
            for (part, name), p in replaced:
                parameter_slots(part)[name] = p
        return tree_map_only(torch.Tensor, as_float32, out) if self.is_model else out

    def _replace_parameters(self) -> list[tuple[Slot, nn.Parameter]]:
        """Put cast tensors into the parameters' slots, and return the parameters."""
        replaced, cast = [], {}
        is_recomputed = is_in_backward()
        for slot in self.slots:
            part, name = slot
            p = parameter_slots(part)[name]
            assert p is not None
            known = self.tied.get(slot) if is_recomputed and isinstance(p, nn.Parameter) else None
            if p not in cast:
                cast[p] = known if known is not None else self._cast(p)
            if cast[p] is not p:
                if cast[p].requires_grad and is_dtensor(p) and known is None:
                    cast[p].register_hook(partial(_reduce_gradient, p.placements))  # type: ignore[attr-defined]
                replaced.append((slot, p))
                # autograd passes its gradient on to the parameter
                parameter_slots(part)[name] = cast[p]  # type: ignore[assignment]
                if self.is_model and slot in self.tied and torch.is_grad_enabled():
                    self.tied[slot] = cast[p].detach().requires_grad_(cast[p].requires_grad)
        return replaced

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor


def _reduce_gradient(placements: Any, gradient: Any) -> Any:
    """Add up a gradient whose terms are on the processes of the axis `tensor`, in bfloat16.

    FSDP2 adds them up in bfloat16 as well, where it has made the cast, before it passes on a float32.
    """
    return gradient.redistribute(placements=placements) if gradient.placements != placements else gradient


def _refuse_unsupported(model: nn.Module) -> None:
    """Raise LoopError for modules that cannot compute in bfloat16, or that hold their weights in a second place."""
    error = f"A {type(model).__name__} cannot compute with parallel.param_dtype=bf16."
    for name, part in model.named_modules():
        subject = f"{name or 'It'} is a {type(part).__name__}"
        if isinstance(part, _NormBase) and part.running_mean is not None:
            fact = f"{subject}, whose running statistics are float32: torch requires float32 weights with them."
            raise LoopError(error, fact, "--set precision=bf16 --set parallel.param_dtype=fp32, or GroupNorm.")
        if _has_spectral_norm(part):
            fact = f"{subject} with a spectral norm, whose vectors stay float32 while its weight is bfloat16."
            raise LoopError(error, fact, "--set precision=bf16 --set parallel.param_dtype=fp32.")
        if isinstance(part, nn.RNNBase):
            fact = f"{subject}, which keeps a list of its weights that cannot be replaced."
            raise LoopError(error, fact, "--set precision=bf16 --set parallel.param_dtype=fp32.")
    for name, p in model.named_parameters():
        if p.is_floating_point() and p.dtype != torch.float32:
            fact = f"{name} is {p.dtype}. Parameters that are trained and saved must be float32; they are cast from it."
            raise LoopError(error, fact, "model.float() before run.place, or --set parallel.param_dtype=fp32.")


def _has_spectral_norm(part: nn.Module) -> bool:
    """Return whether a weight is divided by its largest singular value, in either of torch's ways."""
    parametrizations = [step for row in getattr(part, "parametrizations", {}).values() for step in row]
    _, pre_hooks = forward_hooks_of(part)
    return any(
        type(step).__name__ in ("_SpectralNorm", "SpectralNorm") for step in [*parametrizations, *pre_hooks.values()]
    )
