"""Send a tree from one process to another: the length of its form, the form as JSON, and the bytes of all tensors."""

from __future__ import annotations

import json

import torch

from unisono.distributed.process_group import Message, ProcessGroup, wait_for
from unisono.distributed.pytree import Tree, form_of, pack, size_of, unpack

TAG = 7
"""The tag of these messages under gloo. Exchanges use 0."""


def send_tree(group: ProcessGroup, tree: Tree, to: int) -> None:
    """Send a tree to process `to`, and wait until it is sent."""
    form = torch.frombuffer(bytearray(json.dumps(form_of(tree)).encode()), dtype=torch.uint8).to(group.device)
    length = torch.tensor([len(form)], dtype=torch.int64, device=group.device)
    for tensor in (length, form, pack(tree, group.device)):
        wait_for(group.send_and_receive([Message(tensor, to)], [], tag=TAG))


def receive_tree(group: ProcessGroup, source: int) -> Tree:
    """Return the tree that process `source` sends."""
    length = torch.empty(1, dtype=torch.int64, device=group.device)
    wait_for(group.send_and_receive([], [Message(length, source)], tag=TAG))
    text = torch.empty(int(length), dtype=torch.uint8, device=group.device)
    wait_for(group.send_and_receive([], [Message(text, source)], tag=TAG))
    form = json.loads(bytes(text.tolist()))
    row = torch.empty(size_of(form), dtype=torch.uint8, device=group.device)
    wait_for(group.send_and_receive([], [Message(row, source)], tag=TAG))
    return unpack(row, form)
