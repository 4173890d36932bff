"""Find a script that computes with its part of a parameter as if it were the whole.

Under `parallel.shard` the parameters and gradients that a script sees between its rounds are torch's DTensors, of which
each process holds rows. Elementwise code has the same bits on every placement. A reduction has not: a norm of the rows
that are here differs between processes, and a norm over all rows is added up in another order. In a verified step the
operators that the script calls are looked at, between the rounds and the next step.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import unisono
from unisono.world.collectives import lies_apart, local

if TYPE_CHECKING:
    from unisono.train.models import Models

HERE = (str(Path(unisono.__file__).parent), str(Path(torch.__file__).parent))


class PartsWatch(TorchDispatchMode):
    """Look for reductions over rows of divided parameters.

    found  "operator at file:line" of the first; "": none
    """

    def __init__(self, models: Models) -> None:
        super().__init__()
        self.found = ""
        self.paused = False
        self._models = models
        self._on = False

    def begin(self) -> None:
        """Look from now on."""
        if not self._on:
            self._on = True
            held = [
                local(t.detach()) for p in self._models.params for t in (p, p.grad) if t is not None and lies_apart(t)
            ]
            self._memory = {t.untyped_storage().data_ptr() for t in held if t.numel()}
            self.__enter__()

    def end(self) -> None:
        """Stop looking; ending twice changes nothing."""
        if self._on:
            self._on = False
            self.__exit__(None, None, None)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if not (self.found or self.paused or self._models.busy) and self._reduces(func, args, out):
            self.found = f"{func.__name__.partition('.')[0]} at {caller()}"
        return out

    def _reduces(self, func: Any, args: Any, out: Any) -> bool:
        given = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor) and self._is_part(t)]
        if not given or func.namespace != "aten" or func.is_view:
            return False
        made: list[Any] = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.is_floating_point()]
        if any(lies_apart(t) for t in given):
            return any(lies_apart(t) and any(at.is_partial() for at in t.placements) for t in made)
        smallest = min(t.numel() for t in given)
        return any(t.numel() < smallest for t in made)

    def _is_part(self, tensor: torch.Tensor) -> bool:
        if lies_apart(tensor):
            return _is_cut(tensor)
        return tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() in self._memory


def _is_cut(tensor: Any) -> bool:
    """Has this process rows of it, so that elementwise code computes the rows of the result?"""
    return lies_apart(tensor) and any(placement.is_shard() for placement in tensor.placements)


def caller() -> str:
    """Return file:line of the script's own frame that is nearest."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((*HERE, "<")):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
