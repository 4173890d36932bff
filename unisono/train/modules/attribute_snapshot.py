"""Snapshots of the attributes of modules: find those that have changed since, and restore them.

    module.__dict__   compared as a tuple of its values: the same objects, or equal ones
    list, dict, set   compared item by item, and the items likewise
    tensor            compared by its version; a small tensor has a copy
    anything else     compared by identity

One comparison of 300 modules takes less than 100 microseconds (benchmarks/README.md): values that never change are
compared in C, by identity.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection, Mapping
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from unisono.parallel.pipeline_parallel.shadow_tensor import ShadowTensor


class Absent:
    """The value of an attribute, or of an item, that does not exist."""

    def __repr__(self) -> str:
        return "absent"


ABSENT: Any = Absent()

COPIED = 2**20
"""Largest number of elements of a tensor that is copied, so that writes to it can be undone."""

ITEMS = 1000
"""Largest number of items of a list, dict or set that are compared one by one."""

DEPTH = 3

MARKS = ("__", "_fsdp", "_output_capturing_hooks_installed")
"""Prefixes of attributes that do not belong to the script: fully_shard marks modules, an RNN later than others. In its
first forward pass transformers installs hooks and marks the model. Without the mark it would install them again."""

Key = tuple[str, str]


class AttributeSnapshot:
    """The attributes of some modules, by name, except for the names in `without`.

    copies  whether to hold copies, with which changes can be undone; False: only find changes
    """

    def __init__(
        self, modules: Mapping[str, torch.nn.Module], without: Collection[str], *, copies: bool = True
    ) -> None:
        self.without, self.copies = without, copies
        self._holders: dict[str, _Holder] = {}
        self._weights: set[int] = set()
        self.add(modules)

    def add(self, modules: Mapping[str, torch.nn.Module]) -> None:
        """Add these modules, with their attributes as they are now."""
        self._weights |= {id(t) for m in modules.values() for t in (*m._parameters.values(), *m._buffers.values())}
        for name, module in modules.items():
            self._holders[name] = _Holder(self, module)

    def changed(self) -> list[Key]:
        """Return the attributes that have changed."""
        return [(name, key) for name, holder in self._holders.items() if holder.differs() for key in holder.changed()]

    def changed_buffers(self) -> list[tuple[str, str, torch.Tensor]]:
        """Return (module, name, buffer) of the changed buffers that the state_dict of their module leaves out."""
        found = []
        for name, holder in self._holders.items():
            for key in sorted(holder.module._non_persistent_buffers_set):
                now = holder.module._buffers.get(key)
                if now is not None and holder.buffers.get(key) != _mark(now):
                    found.append((name, key, now))
        return found

    def before(self, key: Key) -> Any:
        """Return the saved value of an attribute."""
        return self._holders[key[0]].saved.get(key[1], ABSENT)

    def value(self, key: Key) -> Any:
        """Return the current value of an attribute."""
        return self._holders[key[0]].holder.get(key[1], ABSENT)

    def remember(self, key: Key) -> None:
        """Save the current value of an attribute."""
        self._holders[key[0]].remember(key[1])

    def forget(self, key: Key) -> None:
        """Stop comparing an attribute."""
        self._holders[key[0]].forget(key[1])

    def put_back(self, key: Key) -> None:
        """Restore the saved value of an attribute."""
        self._holders[key[0]].put_back(key[1])

    def can_put_back(self, key: Key) -> bool:
        """Return whether all contents of an attribute that have changed can be restored."""
        inner = self._holders[key[0]].inner.get(key[1], ())
        return all(each.known or not each.differs() for each in inner)

    def put_all_back(self) -> None:
        """Restore all attributes that have changed, as far as they can be restored."""
        for key in self.changed():
            self.put_back(key)

    def become(self, key: Key, value: Any, *, same: bool) -> None:
        """Set an attribute, and save its new value.

        Args:
            key: the attribute.
            value: its new value.
            same: keep the object that is there, and replace its content.
        """
        holder = self._holders[key[0]]
        holder.free.discard(key[1])
        holder.holder[key[1]] = _into(holder.holder.get(key[1]), value) if same else value
        holder.remember(key[1])

    def is_weight(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is a parameter or a buffer. Writes to these are handled elsewhere."""
        return isinstance(tensor, torch.nn.Parameter) or id(tensor) in self._weights


class _Holder:
    """The attributes of one module."""

    def __init__(self, of: AttributeSnapshot, module: torch.nn.Module) -> None:
        self.of, self.module, self.holder = of, module, vars(module)
        self.simple = _is_torchs(type(module))
        self.saved: dict[str, Any] = {}
        self.free: set[str] = set()  # attributes that may change
        self.inner: dict[str, list[_Inner]] = {}
        self.buffers = {
            key: _mark(t) for key in module._non_persistent_buffers_set if (t := module._buffers.get(key)) is not None
        }
        for key in [*self.holder]:
            if self._belongs_to_the_script(key):
                self._remember(key)
        self._lay_out()

    def _belongs_to_the_script(self, key: str) -> bool:
        """Return whether an attribute is not a mark of a library."""
        return key not in self.of.without and not key.startswith(MARKS)

    def _lay_out(self) -> None:
        """Collect the saved values that `differs` compares at once."""
        keys = [*self.saved]
        self._size = len(self.holder)
        self._keys = keys
        self._get = itemgetter(*keys) if keys else _nothing
        self._values = self._get(self.saved)
        self._inner = [each for found in self.inner.values() for each in found]

    def differs(self) -> bool:
        """Return whether anything has changed. Fast if nothing has."""
        holder = self.holder
        if len(holder) != self._size:
            return True
        try:
            if self._get(holder) != self._values:
                return True
        except Exception:  # an attribute is missing, or the comparison of tensors gives no single bool
            return True
        return any(each.differs() for each in self._inner) if self._inner else False

    def changed(self) -> list[str]:
        found = [key for key in self.saved if not _same(self.holder.get(key, ABSENT), self.saved[key])]
        found += [k for k, inner in self.inner.items() if k not in found and any(each.differs() for each in inner)]
        known = self.saved.keys() | self.free
        found += [key for key in self.holder if key not in known and self._belongs_to_the_script(key)]
        if not found:
            self._lay_out()  # values are equal, but there is another object, or one more attribute that may change
        return found

    def remember(self, key: str) -> None:
        self._remember(key)
        self._lay_out()

    def _remember(self, key: str) -> None:
        self.inner.pop(key, None)
        value = self.holder.get(key, ABSENT)
        if value is ABSENT:
            self.saved.pop(key, None)
            return
        self.saved[key] = value
        if not self.simple and (inner := _inner_of(value, self.of, DEPTH)):
            self.inner[key] = inner

    def forget(self, key: str) -> None:
        self.saved.pop(key, None)
        self.inner.pop(key, None)
        self.free.add(key)
        self._lay_out()

    def put_back(self, key: str) -> None:
        if key in self.saved:
            self.holder[key] = self.saved[key]
            for each in self.inner.get(key, ()):
                each.put_back()
        else:
            self.holder.pop(key, None)
        self._size = len(self.holder)


class _Items:
    """A list, dict, set or deque, and its saved items."""

    def __init__(self, of: Any) -> None:
        self.of, self.length = of, len(of)
        self.items = None
        if self.length <= ITEMS:
            self.items = of.copy() if type(of) in (list, dict, set) else _listed(of)

    @property
    def known(self) -> bool:
        """Whether the content can be restored."""
        return self.items is not None or (isinstance(self.of, list) and len(self.of) > self.length)

    def differs(self) -> bool:
        if len(self.of) != self.length:
            return True
        if self.items is None:
            return False
        now = self.of if type(self.of) in (list, dict, set) else _listed(self.of)
        try:
            return bool(now != self.items)
        except Exception:
            return True

    def put_back(self) -> None:
        if not self.differs():
            return
        if self.items is None:
            if isinstance(self.of, list) and len(self.of) > self.length:  # items were appended
                del self.of[self.length :]
            return
        self.of.clear()
        (self.of.extend if isinstance(self.of, (list, deque)) else self.of.update)(self.items)


class _Content:
    """A tensor, and its saved content."""

    def __init__(self, tensor: torch.Tensor, *, copied: bool) -> None:
        self.of, self.version = tensor, _version(tensor)
        self.copy = tensor.detach().clone() if copied else None

    @property
    def known(self) -> bool:
        return self.copy is not None

    def differs(self) -> bool:
        return _version(self.of) != self.version

    def put_back(self) -> None:
        if self.copy is not None and self.differs():
            with torch.no_grad():
                self.of.detach().copy_(self.copy)
            self.version = _version(self.of)


class _Dice:
    """A generator of random numbers, and its saved state. It is not restored: all virtual ranks would draw the same."""

    known = False

    def __init__(self, of: Any) -> None:
        self.of, self.state = of, _generator_state(of)

    def differs(self) -> bool:
        return _generator_state(self.of) != self.state

    def put_back(self) -> None:
        pass


def _generator_state(of: Any) -> Any:
    if isinstance(of, torch.Generator):
        return of.get_state().numpy().tobytes()
    return of.getstate() if isinstance(of, random.Random) else of.bit_generator.state


_Inner = _Items | _Content | _Dice


def _inner_of(value: Any, of: AttributeSnapshot, depth: int) -> list[_Inner]:
    """Return the parts of a value that can change while it stays the same object."""
    if isinstance(value, torch.Tensor):
        if value.requires_grad or of.is_weight(value) or isinstance(value, ShadowTensor):
            return []
        return [_Content(value, copied=of.copies and value.numel() <= COPIED)]
    if isinstance(value, (torch.Generator, random.Random, np.random.Generator)):
        return [_Dice(value)]
    if not isinstance(value, (list, dict, set, deque, tuple)) or not depth:
        return []
    found: list[_Inner] = [] if isinstance(value, tuple) else [_Items(value)]
    if len(value) <= ITEMS:
        for item in list(value.values()) if isinstance(value, dict) else list(value):
            if isinstance(item, (torch.Tensor, list, dict, set, deque, tuple)):
                found += _inner_of(item, of, depth - 1)
    return found


def _into(now: Any, value: Any) -> Any:
    """Return `value`, written into `now` if that is a container or tensor of the same kind."""
    if isinstance(now, (list, dict, set)) and type(now) is type(value):
        now.clear()
        (now.extend if isinstance(now, list) else now.update)(value)
        return now
    if isinstance(now, torch.Tensor) and now.shape == value.shape and now.dtype == value.dtype:
        with torch.no_grad():
            now.copy_(value)
        return now
    return value


def _is_torchs(kind: type) -> bool:
    """Return whether a module's class is defined by torch. The contents of its attributes are then not compared."""
    return all(base.__module__.partition(".")[0] in ("torch", "builtins", "typing") for base in kind.__mro__)


def _same(now: Any, was: Any) -> bool:
    if now is was:
        return True
    if type(now) is not type(was) or isinstance(now, torch.Tensor):
        return False
    try:
        return bool(now == was)
    except Exception:
        return False


def _mark(tensor: torch.Tensor) -> tuple[int, int]:
    return id(tensor), _version(tensor)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _listed(of: Any) -> Any:
    return dict(of) if isinstance(of, dict) else list(of)


def _nothing(_: Any) -> tuple[()]:
    return ()
