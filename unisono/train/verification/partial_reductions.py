"""Find scripts that compute with their part of a parameter as if it were the whole.

Under `parallel.shard` the parameters and gradients that a script sees between its rounds are torch's DTensors, of which
each process holds rows. Elementwise code has the same bits on every placement. A reduction does not: a norm of the
local rows differs between processes, and a norm over all rows is added up in another order. A verified step observes
the operators that the script calls between the rounds and the next step.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import unisono
from unisono.distributed.process_group import is_dtensor, to_local
from unisono.train.verification.gradient_sums import is_partial

if TYPE_CHECKING:
    from unisono.train.modules.models import Models

UNISONO, TORCH = (str(Path(module.__file__ or "").parent) + os.sep for module in (unisono, torch))


PLAIN = (torch.Tensor, torch.nn.Parameter)


class PartialReductionMode(TorchDispatchMode):
    """Find reductions over rows of sharded parameters.

    found  "operator at file:line" of the first one; "" if there is none
    """

    def __init__(self, models: Models) -> None:
        super().__init__()
        self.found = ""
        self._models = models
        self._on = False

    def begin(self) -> None:
        """Observe operators from now on."""
        if not self._on:
            self._on = True
            held = [
                to_local(t.detach())
                for p in self._models.params
                for t in (p, p.grad)
                if t is not None and is_dtensor(t)
            ]
            self._memory: dict[int, StorageWeakRef] = {}
            self._remember(held)
            self.__enter__()

    def end(self) -> None:
        """Stop observing. A second call has no effect."""
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
        if self.found or self._models.busy or func.namespace != "aten" or func.is_view:
            return out
        given = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor) and self._is_part(t)]
        if given and (where := caller()):
            made = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.is_floating_point()]
            if reduces(given, made):
                self.found = f"{func.__name__.partition('.')[0]} at {where}"
            self._remember(made)
        return out

    def _remember(self, parts: Iterable[torch.Tensor]) -> None:
        """Record tensors that were computed elementwise from parts. They are parts as well."""
        for t in parts:
            if type(t) in PLAIN and t.layout is torch.strided and t.numel():
                storage = t.untyped_storage()
                self._memory[storage.data_ptr()] = StorageWeakRef(storage)

    def _is_part(self, tensor: torch.Tensor) -> bool:
        if is_dtensor(tensor):
            return _is_cut(tensor)
        if type(tensor) not in PLAIN or tensor.layout is not torch.strided:
            return False
        known = self._memory.get(tensor.untyped_storage().data_ptr())
        return known is not None and not known.expired()  # another tensor may have reused the memory


def reduces(given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> bool:
    """Return whether the result of an operator on parts is smaller than the parts, or a sum that is still partial."""
    if any(map(is_dtensor, given)):
        return any(map(is_partial, made))
    smallest = min(t.numel() for t in given)
    return any(t.numel() < smallest for t in made)


def _is_cut(tensor: Any) -> bool:
    """Return whether this process has rows of a tensor, so that elementwise code computes rows of the result."""
    return is_dtensor(tensor) and any(placement.is_shard() for placement in tensor.placements)


def caller() -> str:
    """Return file:line of the nearest frame outside of torch; "" if it is one of the library's own."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (frame.f_code.co_filename == __file__ or _is_torch(frame.f_code.co_filename)):
        frame = frame.f_back
    name = frame.f_code.co_filename
    return "" if name.startswith(UNISONO) else f"{name}:{frame.f_lineno}"


def _is_torch(name: str) -> bool:
    return name.startswith((TORCH, "<"))
