"""Collectives made of sends and receives, which count the bytes that they send."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.distributed.process_group import Message, ProcessGroup, wait_for
from unisono.plan.reduction_tree import Plan


class CountedCollectives:
    """Send messages between the processes of a group, and count the bytes that leave this process."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank, group.size
        self.others = [(group.rank + i) % group.size for i in range(1, group.size)]
        self.sent = 0

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Send and receive messages, and wait until all have arrived."""
        self.sent += sum(message.tensor.nbytes for message in sends)
        wait_for(self.group.send_and_receive(sends, receives))

    def reduce_by_plan(self, plan: Plan, roots: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """Return the sum over all leaves of a plan: the drawing in exchange/tree/tree_exchange.py, for one bucket.

        Args:
            plan: Which process holds which partial sums.
            roots: The partial sums of this process, flat. They may be overwritten.
            like: A flat tensor with the length, dtype and device of a partial sum.
        """
        if self.size == 1:
            return roots[0]
        length = len(like)
        piece = -(-length // self.size)
        own = [torch.nn.functional.pad(root, (0, self.size * piece - length)).view(self.size, piece) for root in roots]
        parts = {holder: [like.new_empty(piece) for _ in plan.sends(holder)] for holder in self.others}
        sends = [Message(root[other], other) for other in self.others for root in own]
        self.exchange(sends, [Message(part, holder) for holder in self.others for part in parts[holder]])
        parts[self.rank] = [root[self.rank] for root in own]
        sums = [part for holder in range(self.size) for part in parts[holder]]
        for i, j in plan.additions():
            sums[i].add_(sums[j])
        chunks = like.new_empty(self.size, piece)
        chunks[self.rank] = sums[0]
        sends = [Message(chunks[self.rank], other) for other in self.others]
        self.exchange(sends, [Message(chunks[other], other) for other in self.others])
        return chunks.flatten()[:length]
