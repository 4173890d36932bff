"""Record the outputs of inner modules, to compare hidden states of a student with those of its teacher."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from unisono.errors import LoopError


class RecordedOutputs:
    """The outputs of some modules of a model in its last forward pass.

        hidden = distill.RecordedOutputs(teacher, ["blocks.3"])     after run.place
        teacher(tokens)
        hidden.take("blocks.3")

    Args:
        model: A placed model.
        names: Names of its modules, as in `model.named_modules()`.

    Raises:
        LoopError: The model has no module of that name.
    """

    def __init__(self, model: torch.nn.Module, names: Iterable[str]) -> None:
        self._found: dict[str, Any] = {}
        self._model = type(model).__name__
        modules = dict(model.named_modules())
        for name in names:
            if name not in modules:
                last = name.rpartition(".")[2]
                like = [other for other in modules if other.rpartition(".")[2] == last] or [n for n in modules if n]
                raise LoopError(
                    f"{self._model} has no module {name!r}.",
                    f"It has {len(modules)}; some are {', '.join(like[:3])}.",
                    "name one of: [name for name, _ in model.named_modules()].",
                )
            modules[name].register_forward_hook(partial(self._keep, name))

    def _keep(self, name: str, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._found[name] = output

    def take(self, name: str) -> Any:
        """Return the output of a module, and release it here.

        Raises:
            LoopError: The module was not called since the last `take`, or it was not named in the constructor.
        """
        if name not in self._found:
            raise LoopError(
                f"There is no output of {name!r} of {self._model}.",
                f"Recorded now: {', '.join(map(repr, self._found)) or 'nothing'}.",
                "call the model first, and take each output once.",
            )
        return self._found.pop(name)
