"""Values that contain tensors, sent between the processes of a group: the structure as JSON, the tensors as bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from unisono.distributed.process_group import Message, ProcessGroup, wait_for
from unisono.tensors.codec import TensorTable, decode, encode, specs_of
from unisono.tensors.spec import as_bytes


def gather_values(group: ProcessGroup, value: Any) -> list[Any]:
    """Return the value of every rank on rank 0, in the order of ranks, with tensors of others in memory of the CPU.

    Every process calls it. On other ranks the list contains only their own value.
    """
    tensors = TensorTable()
    encoded = group.all_gather_object(encode(value, "", tensors))
    if group.rank:
        wait_for(group.send_and_receive([Message(as_bytes(t.to(group.device)), 0) for t in tensors.values()], []))
        return [value]
    found = [value]
    for rank, plain in enumerate(encoded[1:], 1):
        arrived = {name: spec.empty(group.device) for name, spec in specs_of(plain).items()}
        wait_for(group.send_and_receive([], [Message(as_bytes(t), rank) for t in arrived.values()]))
        found.append(decode(plain, {name: t.cpu() for name, t in arrived.items()}))
    return found


def broadcast_tensors(
    group: ProcessGroup, plain: Any, tensors: Mapping[str, torch.Tensor], source: int
) -> dict[str, torch.Tensor]:
    """Return the tensors of rank `source` by name, on the device of the group.

    Args:
        group: Its processes call this together.
        plain: The value that rank `source` has encoded; every process already has it.
        tensors: The tensors of this value. Only those of rank `source` are read.
        source: The rank that has them.
    """
    if group.rank == source:
        found = {name: tensor.to(group.device) for name, tensor in tensors.items()}
    else:
        found = {name: spec.empty(group.device) for name, spec in specs_of(plain).items()}
    group.broadcast_(found.values(), source=source)
    return found
