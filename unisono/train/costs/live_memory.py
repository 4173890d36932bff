"""Count the memory of tensors while a script computes: how much is in use, the most of it, and whose it is.

A torch dispatch mode sees the tensors that operators return, fake ones included. So a micro-batch of a model that does
not fit this machine can be counted, too. What an operator allocates and frees before it returns is not seen. torch's
MemTracker counts the same, but its peak cannot be reset between two phases.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

OUTSIDE = ""
"""The place of tensors that are made outside of all layers."""


class LiveMemory(TorchDispatchMode):
    """Count the bytes of the tensors that are made within this block.

    Args:
        known: Tensors that are not counted: parameters, buffers, the batch.

    Attributes:
        live: The bytes in use.
        peak: The most of them since `reset_peak`.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._place = OUTSIDE
        self._held: dict[int, tuple[int, str]] = {}  # by storage: its bytes, and the layer that made it
        self._known = [storage for tensor in known if (storage := _storage(tensor)) is not None]
        self._ids = set(map(id, self._known))

    def reset_peak(self) -> None:
        """Begin another phase."""
        self.peak = self.live

    def by_layer(self) -> dict[str, int]:
        """Return the bytes in use by the layer that made them."""
        found: dict[str, int] = {}
        for size, place in self._held.values():
            found[place] = found.get(place, 0) + size
        return found

    def naming(self, layers: Mapping[str, nn.Module]) -> ExitStack:
        """Return a block in which tensors belong to the layer whose forward pass makes them.

        Args:
            layers: Layers by name, of which none is inside of another.
        """
        hooks = ExitStack()
        for name, layer in layers.items():
            hooks.callback(layer.register_forward_pre_hook(partial(self._enter, name)).remove)
            hooks.callback(layer.register_forward_hook(partial(self._enter, OUTSIDE)).remove)
        return hooks

    def _enter(self, name: str, *_: Any) -> None:
        self._place = name

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Count what an operator returns."""
        before = set(map(id, map(_storage, _tensors((args, kwargs)))))  # a view of an older tensor is not new
        result = func(*args, **(kwargs or {}))
        for leaf in _tensors(result):
            if id(_storage(leaf)) not in before:
                self._count(leaf)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        storage = _storage(tensor)
        if storage is None or id(storage) in self._held or id(storage) in self._ids:
            return
        size = storage.nbytes()
        self._held[id(storage)] = size, self._place
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, id(storage)).atexit = False

    def _forget(self, key: int) -> None:
        self.live -= self._held.pop(key)[0]


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a tensor, which is one Python object as long as it exists; None: it has none."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # a sparse one
        return None


def bytes_of(tensors: Iterable[Any]) -> int:
    """Return the bytes of the storages of some tensors, each counted once."""
    found = {}
    for tensor in tensors:
        storage = _storage(tensor) if isinstance(tensor, torch.Tensor) else None
        if storage is not None:
            found[id(storage)] = storage
    return sum(storage.nbytes() for storage in found.values())
