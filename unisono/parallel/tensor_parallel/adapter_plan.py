"""The tensor-parallel plan of a model with LoRA adapters, from the plan of the model that they adapt.

peft puts each adapted matrix W into a layer with two small matrices, y = x W + (x A) B. They follow W:

    W by columns    A whole, B by columns: both terms have this process's part of the features
    W by rows       A by rows, B whole:    the sum over features is formed before B, where it is small

LoRA: Hu et al. 2021, arXiv 2106.09685.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle

ADAPTED, FIRST_OF_ADAPTER, SECOND_OF_ADAPTER = "base_layer", "lora_A", "lora_B"
"""peft's names of the parts of an adapted layer."""


def follow_plan(model: nn.Module, plan: Mapping[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    """Return the plan with the names that modules have in a model with adapters, and with styles of the adapters.

    Args:
        model: The model; one without adapters keeps its plan.
        plan: The style of each module, by names within the model that is adapted.
    """
    base: nn.Module = getattr(model, "get_base_model", lambda: model)()
    names = {id(part): f"{name}." if name else "" for name, part in model.named_modules()}
    if base is model and not any(hasattr(part, ADAPTED) for part in model.modules()):
        return dict(plan)
    found: dict[str, ParallelStyle] = {}
    for pattern, style in plan.items():
        for name, part in base.named_modules():
            if name.count(".") == pattern.count(".") and fnmatchcase(name, pattern):
                found |= _styles_of(part, names[id(base)] + name, style)
    return found


def _styles_of(part: nn.Module, name: str, style: ParallelStyle) -> dict[str, ParallelStyle]:
    """Return the styles of the parts of an adapted layer; the style itself for any other module."""
    if not hasattr(part, ADAPTED):
        return {name: style}
    follows = SECOND_OF_ADAPTER if isinstance(style, ColwiseParallel) else FIRST_OF_ADAPTER
    matrices = {
        f"{name}.{inner}": style
        for inner, matrix in part.named_modules()
        if inner.partition(".")[0] == follows and isinstance(matrix, nn.Linear)
    }
    return {f"{name}.{ADAPTED}": style, **matrices}
