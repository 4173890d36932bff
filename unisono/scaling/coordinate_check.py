"""The coordinate check: whether the outputs of layers change as much in wide models as in narrow ones.

Models of several widths make some steps with the same learning rate (Yang, Hu et al. 2021, arXiv 2203.03466, appendix
D.1). With maximal updates, how much an output changes does not depend on the width; with standard ones it grows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from unisono.errors import LoopError

Build = Callable[[], tuple[nn.Module, torch.optim.Optimizer]]


@dataclass(frozen=True)
class CoordinateCheck:
    """What a coordinate check has measured.

    Attributes:
        sizes: By layer and width, the mean absolute output after each step; the first one is that before training.
        changes: By layer and width, the mean absolute change of the output since the beginning, after each step.
    """

    sizes: Mapping[str, Mapping[int, list[float]]]
    changes: Mapping[str, Mapping[int, list[float]]]

    def growth(self, layer: str) -> float:
        """Return by which power of the width the output of a layer changes, after the last step; 0: by none."""
        points = [(math.log(width), math.log(max(rows[-1], 1e-30))) for width, rows in self.changes[layer].items()]
        x, y = (sum(column) / len(points) for column in zip(*points, strict=True))
        return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)

    @property
    def worst(self) -> tuple[str, float]:
        """The layer whose changes grow fastest with the width, and the power."""
        return max(((layer, self.growth(layer)) for layer in self.changes), key=lambda found: found[1])

    def __str__(self) -> str:
        """Return a table with a row for each layer: its change at each width, and the power of the width."""
        width = max(map(len, self.changes))
        widths = list(next(iter(self.changes.values())))
        lines = [" ".join([f"{'layer':{width}}", *(f"{n:>9}" for n in widths), "    power"])]
        for layer, rows in self.changes.items():
            cells = [f"{rows[n][-1]:9.3g}" for n in widths]
            lines.append(" ".join([f"{layer:{width}}", *cells, f"{self.growth(layer):9.2f}"]))
        return "\n".join(lines)


def coordinate_check(
    models: Mapping[int, Build],
    inputs: Any,
    loss_fn: Callable[[Any], torch.Tensor],
    *,
    steps: int = 3,
    seed: int = 0,
) -> CoordinateCheck:
    """Train models of several widths for some steps on one batch, and measure the outputs of their layers.

    It runs in one process and outside of a run. Layers are modules without children that return a tensor.

    Args:
        models: By width, a function that builds a model and its optimizer. At least two.
        inputs: The argument of the models.
        loss_fn: The output of a model -> the loss.
        steps: The number of steps.
        seed: The seed before each model is built.

    Raises:
        LoopError: There are fewer than two widths, or the models have other layers.
    """
    if len(models) < 2 or steps < 1:
        raise LoopError(
            "A coordinate check compares at least two widths, after at least one step.",
            f"It got {len(models)} widths, and steps={steps}.",
            "coordinate_check({64: lambda: build(64), 256: lambda: build(256)}, inputs, loss_fn)",
        )
    sizes: dict[str, dict[int, list[float]]] = {}
    changes: dict[str, dict[int, list[float]]] = {}
    for width, build in models.items():
        torch.manual_seed(seed)
        model, optimizer = build()
        first: dict[str, torch.Tensor] = {}
        for number in range(steps + 1):
            with _outputs(model) as outputs:
                loss = loss_fn(model(inputs))
            for layer, output in outputs.items():
                before = first.setdefault(layer, output)
                sizes.setdefault(layer, {}).setdefault(width, []).append(float(output.abs().mean()))
                if number:
                    change = float((output - before).abs().mean())
                    changes.setdefault(layer, {}).setdefault(width, []).append(change)
            if number < steps:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    for layer, rows in changes.items():
        if len(rows) < len(models):
            raise LoopError(
                "A coordinate check compares models with the same layers.",
                f"The layer {layer} is in {len(rows)} of {len(models)} models.",
                "build them with the same settings except for the width.",
            )
    return CoordinateCheck(sizes, changes)


@contextmanager
def _outputs(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the outputs of all layers in a forward pass, by name; of a layer that is called again, the last one."""
    found: dict[str, torch.Tensor] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor):
                found[name] = output.detach().float()

        return hook

    layers = [(name, module) for name, module in model.named_modules() if next(module.children(), None) is None]
    hooks = [module.register_forward_hook(note(name)) for name, module in layers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
