"""Marks: what people write on a parameter, `p.no_decay = True` say, to find it again when they make an optimizer.

A parameter that is divided is another object, so what was written on the whole one has to be copied onto it. Otherwise
a loop that groups by such a mark would silently group otherwise: all in one group, and no error anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

Marks = Mapping[str, Mapping[str, Any]]
"""By a parameter's name: its attributes."""


def attributes_of_params(model: nn.Module) -> Marks:
    """What is written on the parameters of a model that is not placed yet."""
    return {name: dict(vars(p)) for name, p in model.named_parameters(remove_duplicate=False) if vars(p)}


def restore_attributes(model: nn.Module, marks: Marks) -> None:
    """Write it on those that the model has now, but for what torch has written there itself."""
    for name, p in model.named_parameters(remove_duplicate=False):
        for mark, value in marks.get(name, {}).items():
            if mark not in vars(p):
                setattr(p, mark, value)
