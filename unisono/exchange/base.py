"""The protocol of an exchange, which averages the gradients of all processes.

An exchange lives through a step like this (train/step.py is the caller):

    begin(spans, pieces, weights)
                                 a step begins; pieces[v] micro-batches will come for virtual rank v of our span;
                                 weights() returns the weight of each, as soon as the last backward has begun
    enter(v, last)  leave()      before and after every micro-batch; in between, backward fills p.grad
    launch()                     the last micro-batch is done: send everything that is still here
    finish(weight)               p.grad becomes the sum divided by `weight` (of all processes), the same on every
                                 process; returns whether this process's part of it is finite
    commit()                     all processes hold the whole gradient
    zero()                       the optimizer has stepped: release p.grad

Partial sums are kept until a process adds up the first bucket, late in the last backward. After a failure before that
moment they are exchanged again; after a failure later, the step is computed again from its first micro-batch, to the
same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from unisono.distributed.process_group import ProcessGroup
from unisono.plan.reduction_tree import Node

Spans = Sequence[tuple[int, int]]
Weights = Callable[[], torch.Tensor]
"""float64 [virtual ranks of the process's span], on the group's device."""


PROMISES = ("exact", "exact in practice", "tolerance", "sites are part of the mathematics")
"""What an exchange may promise of the result, from what binds most to what binds least."""


class Exchange(Protocol):
    """What the step asks of an exchange. `promise` and `reason` go into result.json. Whoever inherits from it writes
    what it does, and leaves out where it does nothing: then autograd adds up micro-batches in p.grad, and the rest is
    `finish`. (docs/guide/exchanges/custom.md has one of a script's own.)"""

    promise: str
    reason: str
    params: Sequence[torch.nn.Parameter]

    def begin(self, spans: Spans, pieces: Mapping[int, int], weights: Weights) -> None:
        return

    def enter(self, virtual_rank: int, *, last: bool) -> None:
        return

    def leave(self) -> None:
        return

    def launch(self) -> None:
        return

    def finish(self, weight: float) -> bool: ...

    def commit(self) -> None:
        return

    def zero(self) -> None:
        for p in self.params:
            p.grad = None

    @property
    def used(self) -> Sequence[bool]:
        """Which parameters took part in a backward of this step, on this process."""
        return [p.grad is not None for p in self.params]

    @property
    def touched(self) -> bool:
        """Has the loop changed p.grad in this process's last micro-batch? (Earlier, `leave` raises LoopError.) Messages
        are under way then: who ends now shows the others a peer that is gone, instead of the reason."""
        return False

    @property
    def sent(self) -> float:
        """Bytes of this step's gradient that have left this process for others: as they would if each process were on
        a host of its own, since what neighbours read in shared memory is what they would be sent. Of a library's
        all-reduce it is what the best one sends, 2 (W - 1) / W of the gradient. Not a number: nobody counts them."""
        return math.nan

    @property
    def plain(self) -> float:
        """The same, if gradients were not compressed."""
        return self.sent

    def held(self) -> Mapping[Node, Any]:
        """Return the partial sums that are whole on this process after a failure, by nodes of the tree.

        `continue_after_death` of another exchange over the same parameters takes them. {}: all is computed again.
        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What it carries from one step to the next, whole, with numbers that no placement changes where its promise
        is exact. All processes call this together, between two steps; the main process's is saved. {}: nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there. Called on every process, with tensors in the CPU's memory, before the first step."""
        return

    def close(self) -> None:
        return


def all_reduce_bytes(size: int, group: ProcessGroup) -> float:
    """Bytes that a process sends when `size` bytes are added up over a group, by an all-reduce that sends as few as can
    be: each process adds up one chunk, and hands it to the others."""
    return 2 * (group.size - 1) / group.size * size
