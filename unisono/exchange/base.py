"""The protocol of an exchange, which averages the gradients of all processes.

The training loop (train/step.py) calls an exchange in this order in each step:

    begin(spans, pieces, weights)
                                 a step begins; pieces[v] micro-batches will come for virtual rank v of our span;
                                 weights() returns the weight of each, once the last backward has begun
    enter(v, last)  leave()      before and after every micro-batch; in between, backward fills p.grad
    launch()                     the last micro-batch is done: send what has not been sent yet
    finish(weight)               p.grad becomes the sum divided by `weight` (of all processes), the same on every
                                 process; returns whether this process's part of it is finite
    commit()                     all processes hold the whole gradient
    zero()                       the optimizer has stepped: release p.grad

Partial sums are kept until a process adds up the first bucket, late in the last backward. After a failure before that
moment they are exchanged again. After a later failure the step is computed again from its first micro-batch, with the
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
"""The span [lo, hi) of virtual ranks of each process."""

Weights = Callable[[], torch.Tensor]
"""Returns float64 [virtual ranks of the process's span], on the group's device."""


PROMISES = ("exact", "exact in practice", "tolerance", "depends on the number of sites")
"""What an exchange may promise of the result, from the strongest to the weakest."""


class Exchange(Protocol):
    """Average the gradients of all processes.

    A subclass writes `finish`, and those of the other methods in which it has something to do. By default autograd adds
    up micro-batches in p.grad. docs/guide/exchanges/custom.md shows an exchange in a script.

    Attributes:
        promise: One of PROMISES; it goes into result.json.
        reason: Why that is promised; it goes into result.json.
        params: The parameters whose gradients are averaged.
    """

    promise: str
    reason: str
    params: Sequence[torch.nn.Parameter]

    def begin(self, spans: Spans, pieces: Mapping[int, int], weights: Weights) -> None:
        """Begin a step.

        Args:
            spans: The span of virtual ranks of each process.
            pieces: The number of micro-batches of each virtual rank of this process.
            weights: Returns the weight of each virtual rank of this process, once the last backward has begun.
        """
        return

    def enter(self, virtual_rank: int, *, last: bool) -> None:
        """Begin a micro-batch of a virtual rank; `last`: no other one follows on this process in this step."""
        return

    def leave(self) -> None:
        """End a micro-batch."""
        return

    def launch(self) -> None:
        """Send what has not been sent yet: no more micro-batches come in this step."""
        return

    def finish(self, weight: float) -> bool:
        """Set p.grad to the sum over all processes divided by `weight`.

        Returns:
            Whether this process's part of it is finite.
        """
        ...

    def commit(self) -> None:
        """Release what a repeated step would need: all processes hold the whole gradient."""
        return

    def zero(self) -> None:
        """Release p.grad after the optimizer has stepped."""
        for p in self.params:
            p.grad = None

    @property
    def used(self) -> Sequence[bool]:
        """Which parameters took part in a backward of this step, on this process."""
        return [p.grad is not None for p in self.params]

    @property
    def touched(self) -> bool:
        """Whether the loop has changed p.grad in this process's last micro-batch.

        (In an earlier one, `leave` raises LoopError.) Messages are under way then, so the error is raised later: a
        process that ended now would look like a lost peer to the others.
        """
        return False

    @property
    def sent(self) -> float:
        """Bytes of this step's gradient that this process has sent, as if each process were on a host of its own.

        What neighbors read in shared memory counts as sent. For a library's all-reduce it is the least that one can
        send: 2 (W - 1) / W of the gradient. NaN: it is not counted.
        """
        return math.nan

    @property
    def plain(self) -> float:
        """Bytes that `sent` would be if gradients were not compressed."""
        return self.sent

    def held(self) -> Mapping[Node, Any]:
        """Return the partial sums that are whole on this process after a failure, by nodes of the tree.

        `continue_after_death` of another exchange over the same parameters takes them. {}: all is computed again.
        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return what the exchange carries from step to step; {}: nothing.

        All processes call this together, between two steps, and the main process's is saved. Where the promise is
        exact, the numbers in it do not depend on the placement.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. Called on every process, with tensors on the CPU, before the first step."""
        return

    def close(self) -> None:
        """Release hooks and memory."""
        return


def all_reduce_bytes(size: int, group: ProcessGroup) -> float:
    """Return the bytes that a process sends in an all-reduce of `size` bytes that sends as few as possible.

    Each process adds up one chunk, and sends the sum to the others.
    """
    return 2 * (group.size - 1) / group.size * size
