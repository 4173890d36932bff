"""Observe whether modules read an attribute before they write it.

While a module is observed, its class is a subclass of its own that records the first use of every attribute. Nothing
else about the module changes, and its class is restored after one virtual rank. If torch.compile has compiled any code,
nothing is observed, because compiled code depends on the class of a module.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

PATIENCE = 16
"""Number of virtual ranks for which an attribute is observed if none of them uses it."""

_TORCHS = "torch.nn.modules.module"

_noted: dict[int, dict[str, bool]] = {}
"""By id of an observed module: for each attribute, whether its first use was a read."""

_observers: dict[type, type] = {}


class AttributeReads:
    """The attributes to observe, and the modules that are observed now."""

    def __init__(self) -> None:
        self._asked: dict[str, dict[str, int]] = {}  # module -> attribute -> number of virtual ranks left to observe
        self._observed: dict[str, tuple[torch.nn.Module, type]] = {}

    def observe(self, module: str, attribute: str) -> None:
        """Observe this attribute from the next `begin` on."""
        self._asked.setdefault(module, {})[attribute] = PATIENCE

    def begin(self, modules: Mapping[str, torch.nn.Module]) -> None:
        """Record the use of the attributes from now on."""
        if not self._asked or self._observed or _compiles():
            return
        for name in self._asked:
            if (module := modules.get(name)) is None:
                continue
            kind = type(module)
            try:
                if kind not in _observers:
                    _observers[kind] = _observer_of(kind)
                module.__class__ = _observers[kind]
            except TypeError:  # the memory layout of this class does not allow it
                continue
            _noted[id(module)] = {}
            self._observed[name] = module, kind

    def end(self) -> dict[tuple[str, str], bool]:
        """Stop observing. Return {(module, attribute): whether it was read before it was written} of the used ones."""
        if not self._observed:
            return {}
        found: dict[tuple[str, str], bool] = {}
        for name, (module, kind) in self._observed.items():
            module.__class__ = kind
            noted, asked = _noted.pop(id(module)), self._asked[name]
            for attribute in [*asked]:
                asked[attribute] -= 1
                if attribute in noted:
                    found[name, attribute] = noted[attribute]
                if attribute in noted or not asked[attribute]:
                    del asked[attribute]
            if not asked:
                del self._asked[name]
        self._observed = {}
        return found


class _Observer:
    """The first base class of a module's class while the module is observed."""

    def __init_subclass__(cls, **_: Any) -> None:
        """Do nothing, so that no registry of the script's classes registers this one."""

    def __getattribute__(self, name: str) -> Any:
        noted = _noted.get(id(self))
        if noted is not None:
            if name == "__dict__" and sys._getframe(1).f_globals.get("__name__") != _TORCHS:
                for each in super().__getattribute__(name):
                    noted.setdefault(each, True)
            noted.setdefault(name, True)
        return super().__getattribute__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        _noted.get(id(self), {}).setdefault(name, False)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        _noted.get(id(self), {}).setdefault(name, False)
        super().__delattr__(name)


def _observer_of(kind: type) -> type:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind)(kind.__name__, (_Observer, kind), names)


def _compiles() -> bool:
    """Return whether torch.compile has compiled something in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters["frames"])
