"""What the rounding of this processor depends on."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

ALIKE = "this processor rounds alike at all addresses"


@cache
def depends_on_addresses() -> bool:
    """Return whether a linear layer gives other bits for an input at another address, as on some processors."""
    layer, memory, found = nn.Linear(13, 8), torch.zeros(41 * 13), set()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for rows in range(3, 40):
        x = torch.randn(rows, 13)
        for first in range(16):
            moved = memory[first : first + x.numel()].view_as(x).copy_(x)
            gradient, *_ = torch.autograd.grad(layer(moved).tanh().sum(), [layer.weight])
            found.add((rows, gradient.numpy().tobytes()))
    torch.set_num_threads(threads)
    return len(found) > len({rows for rows, _ in found})


@cache
def depends_on_batch_size() -> bool:
    """Return whether a linear layer gives other bits for a row in a batch of another size, as on some processors."""
    layer, x = nn.Linear(12, 32), torch.randn(64, 12)
    with torch.no_grad():
        whole = layer(x)
        return any(not torch.equal(layer(x[:rows]), whole[:rows]) for rows in range(1, 64))
