"""Activations between stages where sequences are divided too (parallel.sequence_parallel): each process sends its part.

Process i of the axis `tensor` in one stage has the part that process i of the next stage needs, so only parts are sent.
But 9 positions on two processes are 5 and 4, and neither part shows whether the whole has 8, 9 or 10. So two numbers
for each tensor are sent after the tensors: the dim in which it is divided (-1: it is not), and its whole length there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def parts_of(tensors: Sequence[torch.Tensor], mesh: DeviceMesh) -> list[torch.Tensor]:
    """Return the tensors to send: this process's part of each, and a table [tensors, 2] of dims and whole lengths.

    Gradients of the parts are sent back.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard  # the import takes 0.5 s

    parts, places = [], []
    for tensor in tensors:
        dim, length = -1, 0
        if isinstance(tensor, DTensor):
            (place,) = tensor.placements
            if isinstance(place, Shard):
                dim, length = place.dim, tensor.shape[place.dim]
            else:  # it is replicated, or partial
                tensor = tensor.redistribute(mesh, [Replicate()])
            tensor = tensor.to_local()
        parts.append(tensor)
        places.append([dim, length])
    return [*parts, torch.tensor(places, device=mesh.device_type).view(-1, 2)]


def from_parts(received: Sequence[torch.Tensor], mesh: DeviceMesh) -> list[torch.Tensor]:
    """Return the tensors whose parts were received, as DTensors where they are divided."""
    from torch.distributed.tensor import DTensor, Shard

    if not received:
        return []
    *parts, places = received
    tensors: list[torch.Tensor] = []
    for part, (dim, length) in zip(parts, places.tolist(), strict=True):
        if dim < 0:
            tensors.append(part)
            continue
        shape = torch.Size([*part.shape[:dim], length, *part.shape[dim + 1 :]])
        stride = torch.empty(shape, device="meta").stride()
        tensors.append(DTensor.from_local(part, mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride))
    return tensors
