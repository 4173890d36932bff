"""Store the weights of convolutions in the memory format channels_last.

A convolution whose weight is in this format computes in it, whatever the format of its input is
(https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html). Other parameters stay as they are. Under
shards, memory_format.py keeps the format.
"""

from __future__ import annotations

import torch
from torch import nn

FORMATS: dict[type, torch.memory_format] = {
    nn.Conv2d: torch.channels_last,
    nn.ConvTranspose2d: torch.channels_last,
    nn.Conv3d: torch.channels_last_3d,
    nn.ConvTranspose3d: torch.channels_last_3d,
}
"""The format of the weights of a layer, [out, in, height, width] or [out, in, depth, height, width]."""


def store_channels_last(model: nn.Module) -> int:
    """Store the weights of a model's convolutions in channels_last, in place, and return how many there are."""
    count = 0
    for module in model.modules():
        found = next((form for kind, form in FORMATS.items() if isinstance(module, kind)), None)
        weight = getattr(module, "weight", None)
        if found is not None and isinstance(weight, nn.Parameter):  # a parametrization computes it otherwise
            weight.data = weight.data.contiguous(memory_format=found)
            count += 1
    return count
