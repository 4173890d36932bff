"""Compute linear layers in float8 with torchao (https://docs.pytorch.org/ao/stable/workflows/training.html).

Weights stay float32. In each forward pass a layer scales its input, its weight and the gradient of its output by their
largest elements, casts them to 8 bits (e4m3, and e5m2 for gradients; Micikevicius et al., FP8 Formats for Deep
Learning, arXiv:2209.05433), and multiplies them. A scale depends on one micro-batch and one whole weight, so on no
placement.

torchao is imported in functions, because it takes seconds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from unisono.errors import SettingsError

INSTALL = "pip install 'unisono[quantize]'"

MULTIPLE = 16
"""The sizes of a matrix that is multiplied in float8 are multiples of this."""

CAPABILITY = (8, 9)
"""The compute capability of the first NVIDIA GPUs with products in float8."""


def lacks_float8(kind: str, device: torch.device) -> str:
    """Return why a device cannot compute in float8; "": it can.

    Args:
        kind: The value of the setting `speed.float8`.
        device: The device of a process.
    """
    if kind in ("none", "emulated"):
        return ""
    wanted = f"It needs an NVIDIA GPU of compute capability {'.'.join(map(str, CAPABILITY))} or newer"
    if device.type != "cuda" or torch.version.cuda is None:
        return f"{wanted}, and processes here compute on {device.type}."
    found = torch.cuda.get_device_capability(device)
    return f"{wanted}, and this one has {'.'.join(map(str, found))}." if found < CAPABILITY else ""


def fits_float8(module: nn.Module) -> bool:
    """Return whether a module is a linear layer whose sizes are multiples of 16."""
    return type(module) is nn.Linear and not (module.in_features % MULTIPLE or module.out_features % MULTIPLE)


def use_float8(model: nn.Module, kind: str, device: torch.device) -> tuple[nn.Module, int]:
    """Return a model whose linear layers compute in float8, and the number of these layers.

    Layers are replaced in place, unless the model itself is one. Parameters and their names stay the same.

    Args:
        model: The model, with float32 parameters.
        kind: The value of the setting `speed.float8`, other than "none".
        device: The device of this process.

    Raises:
        SettingsError: torchao is not installed, or the device cannot compute in float8.
    """
    why = lacks_float8(kind, device)
    if why:
        raise SettingsError(f"speed.float8 = {kind}", why, "--set speed.float8=emulated, which is slow, or =none")
    count = sum(map(fits_float8, model.modules()))
    if not count:
        return model, 0
    config, convert = _torchao(kind)
    return convert(model, config=config, module_filter_fn=lambda module, _: fits_float8(module)), count


def _torchao(kind: str) -> tuple[Any, Any]:
    """Return torchao's configuration for a kind, and its function that converts a model."""
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        facts = "It needs torchao, which is not installed."
        raise SettingsError(f"speed.float8 = {kind}", facts, INSTALL) from error
    if kind == "rowwise":
        return Float8LinearConfig.from_recipe_name("rowwise"), convert_to_float8_training
    return Float8LinearConfig(emulate=kind == "emulated"), convert_to_float8_training
