"""Keep attributes that scripts set on parameters, such as `p.no_decay = True`, when parameters are replaced.

A parameter that is divided is another object, so its attributes are copied to it. Otherwise a script that groups
parameters by such an attribute would put all of them into one group, without an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

Attributes = Mapping[str, Mapping[str, Any]]
"""The attributes of each parameter, by its name."""


def attributes_of_params(model: nn.Module) -> Attributes:
    """Return the attributes of the parameters of a model that is not parallelized yet."""
    return {name: dict(vars(p)) for name, p in model.named_parameters(remove_duplicate=False) if vars(p)}


def restore_attributes(model: nn.Module, attributes: Attributes) -> None:
    """Set the attributes on the parameters that the model has now, except for those that torch has set there."""
    for name, p in model.named_parameters(remove_duplicate=False):
        for attribute, value in attributes.get(name, {}).items():
            if attribute not in vars(p):
                setattr(p, attribute, value)
