"""The layers of a model: what occurs in a row. They are gathered, recomputed, compiled and dealt to devices as one."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Self

from torch import nn

from unisono.errors import LoopError


def layers_of(model: nn.Module, classes: Sequence[str] = ()) -> list[nn.Module]:
    """A model's layers, inner ones before what contains them.

    classes  the names of their classes; otherwise the members of every ModuleList or Sequential in which two or more
             are of one class with parameters: a transformer's blocks, a network's stages
    """
    parts = [part for part in model.modules() if part is not model and next(part.parameters(), None) is not None]
    if classes:
        missing = set(classes) - {type(part).__name__ for part in parts}
        if missing:
            known = sorted({type(part).__name__ for part in parts})
            raise LoopError(
                f"parallel.layer_classes names {' and '.join(sorted(missing))}.",
                f"{type(model).__name__} has parts with parameters of class {', '.join(known)}.",
                f"--set 'parallel.layer_classes=[\"{known[0] if known else ''}\"]', or leave it out.",
            )
        found = [part for part in parts if type(part).__name__ in classes]
    else:
        rows = [part for part in [model, *parts] if isinstance(part, nn.ModuleList | nn.Sequential)]
        found = []
        for row in rows:
            count = Counter(type(part) for part in row.children() if part in parts)
            called = [inner for part in row.children() if count[type(part)] > 1 for inner in _called(part)]
            found += [part for part in called if part not in found]
    return found[::-1]


def _called(part: nn.Module) -> list[nn.Module]:
    """What of a member of a row is called: itself, unless it is a mere shelf (a ModuleDict, a ModuleList). Nobody calls
    that, so nothing could be gathered or recomputed around it: each of what stands on it is a layer."""
    if not isinstance(part, nn.ModuleList | nn.ModuleDict) or type(part).forward is not nn.Module.forward:
        return [part]
    standing = [inner for inner in part.children() if next(inner.parameters(), None) is not None]
    return [layer for inner in standing for layer in _called(inner)]


def outermost(model: nn.Module, classes: Sequence[str] = ()) -> list[nn.Module]:
    """Those layers that are in no other one, in the model's order. A model without any is one layer."""
    found = layers_of(model, classes)
    within = {part for layer in found for part in layer.modules() if part is not layer}
    return [part for part in model.modules() if part in found and part not in within] or [model]


def untied(model: nn.Module, modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Those of the modules that share no parameter with what is outside of them: it would have to be gathered twice."""
    uses = Counter(p for part in model.modules() for p in part.parameters(recurse=False))

    def alone(module: nn.Module) -> bool:
        inside = Counter(p for part in module.modules() for p in part.parameters(recurse=False))
        return all(uses[p] == count for p, count in inside.items())

    return [module for module in modules if alone(module)]


class ForwardWrapper:
    """Something around a module's forward. The module keeps its class, its names and its hooks, so a checkpoint does
    not know about it. A deep copy of the module has one of its own, around its own forward."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward: Callable[..., Any] = module.forward
        functools.update_wrapper(self, self.forward, updated=())  # inspect.signature sees the module's own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__ = copy.deepcopy(self.__dict__, memo)
        return copied
