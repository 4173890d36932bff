"""Draw the random numbers of a sharded tensor as one process draws those of the whole tensor.

A script may add noise to gradients or weights between two steps (`p.grad.add_(torch.randn_like(p.grad))`). torch draws
part by part for a DTensor: on a CPU every process draws the same numbers for its own part, so the result would depend
on the number of processes. Here every process draws for the whole tensor, from generators in the same state, and keeps
its part. This needs the memory of one whole tensor at a time. No message is sent, except where the tensor holds the
probabilities (`torch.bernoulli(p)`), which is gathered first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import distribute_tensor

from unisono.torch_compat.modules import dtensor_handlers

_aten = torch.ops.aten

NEW = {
    *(_aten.randn_like.default, _aten.rand_like.default),
    *(_aten.randint_like.default, _aten.randint_like.low_dtype),
}
"""Operators that make a tensor like another one."""

IN_PLACE = {_aten.normal_.default, _aten.uniform_.default, _aten.bernoulli_.float}
"""Operators that fill a tensor."""

OF_VALUES = {_aten.bernoulli.default, _aten.native_dropout.default}
"""Operators whose result depends on the values of the tensor."""


def draw_as_whole() -> None:
    """Let these operators draw for a DTensor what they draw for a whole tensor, from now on.

    Do not call it with parallel.tensor, whose activations are DTensors as well and keep torch's way.
    """
    handlers = dtensor_handlers()
    handlers.update(dict.fromkeys(NEW, _like))
    handlers.update(dict.fromkeys(IN_PLACE, _fill))
    handlers.update(dict.fromkeys(OF_VALUES, _of_values))


def _like(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    part, *more = args
    whole = operator(torch.empty(part.shape, dtype=part.dtype, device=part.to_local().device), *more, **kwargs)
    return _distribute(whole, part)


def _fill(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    part, *more = args
    local = part.to_local()
    whole = operator(torch.empty(part.shape, dtype=part.dtype, device=local.device), *more, **kwargs)
    local.copy_(_distribute(whole, part).to_local())
    return part


def _of_values(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    part, *more = args
    whole = operator(part.full_tensor(), *more, **kwargs)
    return tuple(_distribute(t, part) for t in whole) if isinstance(whole, tuple) else _distribute(whole, part)


def _distribute(whole: torch.Tensor, like: Any) -> Any:
    """Return this process's part. No message is sent, because all processes have drawn the same."""
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
