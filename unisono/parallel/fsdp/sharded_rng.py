"""Random numbers for tensors that are divided among processes: those that a whole tensor would get.

A script may add noise to gradients or weights between two steps (`p.grad.add_(torch.randn_like(p.grad))`). torch draws
part by part for a DTensor: on a CPU every process draws the same numbers for its own part, so the result would depend
on the number of processes. Here every process draws for the whole tensor, from generators in the same state, and keeps
its part. This needs the memory of one whole tensor at a time. No message is sent, except where the probabilities are in
the tensor itself (`torch.bernoulli(p)`), which is gathered first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

_aten = torch.ops.aten

NEW = {
    *(_aten.randn_like.default, _aten.rand_like.default),
    *(_aten.randint_like.default, _aten.randint_like.low_dtype),
}
"""Operators that make a tensor like another one."""

IN_PLACE = {_aten.normal_.default, _aten.uniform_.default, _aten.bernoulli_.float}
"""Operators that fill a tensor."""

OF_VALUES = {_aten.bernoulli.default, _aten.native_dropout.default}
"""Operators whose result depends on what is in the tensor."""


def draw_as_whole() -> None:
    """From now on these operators draw for a DTensor what they would draw for a whole tensor. Tensors that are divided
    by parallel.tensor, whose activations are DTensors as well, keep torch's way: do not call it then."""
    handlers: dict[Any, Callable[..., Any]] = DTensor._op_dispatcher._custom_op_handlers
    handlers.update(dict.fromkeys(NEW, _like))
    handlers.update(dict.fromkeys(IN_PLACE, _fill))
    handlers.update(dict.fromkeys(OF_VALUES, _of_values))


def _like(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    part, *more = args
    whole = operator(torch.empty(part.shape, dtype=part.dtype, device=part.to_local().device), *more, **kwargs)
    return _divided(whole, part)


def _fill(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    part, *more = args
    here = part.to_local()
    whole = operator(torch.empty(part.shape, dtype=part.dtype, device=here.device), *more, **kwargs)
    here.copy_(_divided(whole, part).to_local())
    return part


def _of_values(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    part, *more = args
    whole = operator(part.full_tensor(), *more, **kwargs)
    return tuple(_divided(each, part) for each in whole) if isinstance(whole, tuple) else _divided(whole, part)


def _divided(whole: torch.Tensor, like: Any) -> Any:
    """This process's part; no message travels, since all have drawn the same."""
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
