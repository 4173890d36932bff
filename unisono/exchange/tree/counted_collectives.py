"""Messages that are counted, and a sum by the tree that is made of them alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.distributed.process_group import Message, ProcessGroup, wait_for
from unisono.plan.reduction_tree import Plan


class CountedCollectives:
    """Messages between the processes of a group, and how many bytes of them have left this one."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank, group.size
        self.others = [(group.rank + i) % group.size for i in range(1, group.size)]
        self.sent = 0

    def trade(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Send and receive these; returns when all has come."""
        self.sent += sum(message.tensor.nbytes for message in sends)
        wait_for(self.group.send_and_receive(sends, receives))

    def add_up(self, plan: Plan, roots: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """The sum over all leaves of the plan, from our partial sums of it, each as long as `like`: what
        exchange/tree/tree_fold.py draws, in messages, one bucket. Our partial sums may be written to."""
        if self.size == 1:
            return roots[0]
        length = len(like)
        piece = -(-length // self.size)
        ours = [torch.nn.functional.pad(root, (0, self.size * piece - length)).view(self.size, piece) for root in roots]
        parts = {holder: [like.new_empty(piece) for _ in plan.sends(holder)] for holder in self.others}
        sends = [Message(root[other], other) for other in self.others for root in ours]
        self.trade(sends, [Message(part, holder) for holder in self.others for part in parts[holder]])
        parts[self.rank] = [root[self.rank] for root in ours]
        sums = [part for holder in range(self.size) for part in parts[holder]]
        for i, j in plan.additions():
            sums[i].add_(sums[j])
        whole = like.new_empty(self.size, piece)
        whole[self.rank] = sums[0]
        sends = [Message(whole[self.rank], other) for other in self.others]
        self.trade(sends, [Message(whole[other], other) for other in self.others])
        return whole.flatten()[:length]
