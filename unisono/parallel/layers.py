"""Find the layers of a model: modules of one class in a row, which are gathered, recomputed or compiled as one."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Self

from torch import nn

from unisono.errors import LoopError


def layers_of(model: nn.Module, classes: Sequence[str] = ()) -> list[nn.Module]:
    """Return a model's layers, inner ones before what contains them.

    Args:
        model: The model.
        classes: The names of the layers' classes. By default: the members of every ModuleList or Sequential in which
            two or more are of one class with parameters, such as a transformer's blocks or a network's stages.

    Raises:
        LoopError: The model has no module of such a class.
    """
    parts = [part for part in model.modules() if part is not model and next(part.parameters(), None) is not None]
    if classes:
        missing = set(classes) - {type(part).__name__ for part in parts}
        if missing:
            known = sorted({type(part).__name__ for part in parts})
            raise LoopError(
                f"{type(model).__name__} has no layer of class {' and '.join(sorted(missing))}.",
                f"parallel.layer_classes names it. The modules with parameters are of class {', '.join(known)}.",
                f"--set 'parallel.layer_classes=[\"{known[0] if known else ''}\"]', or leave it out.",
            )
        found = [part for part in parts if type(part).__name__ in classes]
    else:
        rows = [part for part in [model, *parts] if isinstance(part, nn.ModuleList | nn.Sequential)]
        found = []
        for row in rows:
            count = Counter(type(part) for part in row.children() if part in parts)
            called = [inner for part in row.children() if count[type(part)] > 1 for inner in _called_modules(part)]
            found += [part for part in called if part not in found]
    return found[::-1]


def _called_modules(part: nn.Module) -> list[nn.Module]:
    """Return the modules of a row's member that are called.

    That is the member itself, unless it is a container without a forward (a ModuleDict, a ModuleList). Nothing could be
    gathered or recomputed around that, so each module in it is a layer.
    """
    if not isinstance(part, nn.ModuleList | nn.ModuleDict) or type(part).forward is not nn.Module.forward:
        return [part]
    members = [inner for inner in part.children() if next(inner.parameters(), None) is not None]
    return [layer for inner in members for layer in _called_modules(inner)]


def outermost(model: nn.Module, classes: Sequence[str] = ()) -> list[nn.Module]:
    """Return the layers that are in no other layer, in the model's order. A model without layers is one layer."""
    found = layers_of(model, classes)
    inner = {part for layer in found for part in layer.modules() if part is not layer}
    return [part for part in model.modules() if part in found and part not in inner] or [model]


def untied(model: nn.Module, modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules that share no parameter with the rest of the model, which would be gathered twice."""
    uses = Counter(p for part in model.modules() for p in part.parameters(recurse=False))

    def is_untied(module: nn.Module) -> bool:
        inside = Counter(p for part in module.modules() for p in part.parameters(recurse=False))
        return all(uses[p] == count for p, count in inside.items())

    return [module for module in modules if is_untied(module)]


class ForwardWrapper:
    """Wrap a module's forward.

    The module keeps its class, its names and its hooks, so checkpoints do not change. A deep copy of the module has a
    wrapper of its own, around its own forward.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward: Callable[..., Any] = module.forward
        functools.update_wrapper(self, self.forward, updated=())  # so inspect.signature returns the module's own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__ = copy.deepcopy(self.__dict__, memo)
        return copied
