"""What both all-reduces of the tree exchange do: a bucket passes stages, each some buckets after its announcement.

    send(0)     announce bucket 0
    send(1)     bucket 0: stage 1      announce bucket 1
    send(2)     bucket 0: stage 2      bucket 1: stage 1      announce bucket 2

Autograd hooks call `send` in the same order of buckets on all processes. So all processes send the same sequence of
messages, and the messages of a bucket travel while backward computes and while other buckets are added up. The first
messages also carry the weights to divide by.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import reduce

import torch

from unisono.distributed.process_group import PreparedMessages, ProcessGroup, Work, wait_for
from unisono.exchange.base import Weights
from unisono.exchange.buckets import BucketLayout, blocks
from unisono.exchange.gradient_accumulation import FlatGradient
from unisono.exchange.kernels.device_kernels import kernels_for
from unisono.exchange.kernels.elementwise import are_finite
from unisono.exchange.kernels.exchange_stream import ExchangeStream
from unisono.exchange.tree.host_memory import HostMemory
from unisono.plan.host_routes import HostRoutes, Pairs
from unisono.plan.reduction_tree import Plan


class StagedAllReduce(ABC):
    """Exchange and add up the partial sums of a step under one plan.

    Args:
        plan: Which process holds which partial sums.
        layout: The buckets.
        group: The processes that exchange gradients.
    """

    lag: int
    """How many buckets the last stage is behind the announcement. Equal on all processes."""

    def __init__(self, plan: Plan, layout: BucketLayout, group: ProcessGroup) -> None:
        self.layout, self.group, self.rank = layout, group, group.rank
        self.memory = HostMemory(layout, group.neighbors, group.rank)
        self.row = torch.zeros(
            plan.leaves, dtype=torch.float64, device=group.device
        )  # the weights of all virtual ranks
        self.ready = torch.zeros(1, dtype=torch.uint8)  # the content of a "ready" or "done" message, which is not read
        self.stream = ExchangeStream(bucket.device for bucket in layout.buckets)
        self.plan = plan

    @abstractmethod
    def prepare(self, roots: Sequence[FlatGradient | None], result: FlatGradient) -> None:
        """Build the messages of all buckets. Call it before the first `send` of a step.

        Args:
            roots: The partial sums of this process, in the plan's order; None: zeros.
            result: Where the sum is gathered. It may be the first partial sum: the others have received their chunks
                of it before they send the sums that belong there.
        """

    @abstractmethod
    def _first_messages(self, bucket: int) -> Sequence[tuple[PreparedMessages, list[list[Work]]]]:
        """Return the first messages of a bucket, and for each the list to which its works are appended."""

    @abstractmethod
    def _advance(self, bucket: int) -> None:
        """Let the buckets before this one reach their next stages. All processes do this in one order.

        After the last bucket, it is called with the numbers that would follow.
        """

    @abstractmethod
    def _last_works(self) -> Iterable[Work]:
        """Return the works of the last stages."""

    @abstractmethod
    def _forget_works(self) -> None:
        """Drop all works and messages of the step."""

    def begin(self, weights: Weights, divisor: torch.Tensor | None = None) -> None:
        """Begin a step.

        Args:
            weights: Returns the weight of each virtual rank of this process, once the last backward has begun.
            divisor: The total weight, where it is known already; then no weights are exchanged.
        """
        self.stream.join()  # a step that was broken off may still use memory
        self.weights = weights
        self.divisor = divisor
        self.error: Exception | None = None  # of a message that was sent from inside backward
        self._announced = 0  # buckets
        self._block_is_finite: list[torch.Tensor] = []
        self._own_chunks: list[torch.Tensor] = []  # the chunk of every bucket that this process has added up
        self._forget_works()

    def _carries_weights(self, bucket: int) -> bool:
        """Return whether the messages of this bucket carry the weights of virtual ranks."""
        return bucket == 0 and self.divisor is None

    def send(self, bucket: int) -> None:
        """Start to exchange the partial sums of a bucket, which are complete on this process.

        Autograd hooks call it. Where the run survives deaths, an error waits for `finish`, because the gradients that
        backward still computes are needed.
        """
        if self.error is not None:
            return
        try:
            with self.stream.block():
                if self._carries_weights(bucket):
                    self.row[slice(*self.plan.spans[self.rank])].copy_(self.weights())
                self._advance(bucket)
                for messages, started in self._first_messages(bucket):
                    started.append(messages.wrap([start() for start in messages.starts]))
                self._announced = bucket + 1
        except (RuntimeError, ConnectionError) as error:
            if self.group.monitor is None:
                raise
            self.error = error

    def finish(self) -> bool:
        """Wait until the sum is whole in the `result` of `prepare`.

        Returns:
            Whether the chunks that this process has added up are finite.
        """
        try:
            if self.error is not None:
                raise self.error
            with self.stream.block():
                for bucket in range(self._announced, self._announced + self.lag):
                    self._advance(bucket)
                wait_for(self._last_works())
                is_finite = are_finite(self._block_is_finite, self._own_chunks)
        finally:
            self.stream.join()
        # gloo's works keep its connections open: a forked loader worker would close them, and hang
        self._forget_works()
        return is_finite

    def _total_weight(self) -> torch.Tensor:
        """Return the sum of the weights of all virtual ranks, in their order."""
        return reduce(torch.add, self.row)

    def _reduce_in_order(
        self, terms: list[torch.Tensor], additions: Pairs, divisor: torch.Tensor, outs: list[torch.Tensor]
    ) -> None:
        """Write the total of our chunk over the divisor to all of `outs`, of which the first is our own.

        One block at a time, so that it stays in the cache. `terms` are overwritten. The last addition makes the total.
        """
        self._own_chunks.append(outs[0])
        for block in blocks(outs[0]):
            parts, (result, *others) = [term[block] for term in terms], [out[block] for out in outs]
            for i, j in additions[:-1]:
                parts[i].add_(parts[j])
            for i, j in additions[-1:]:  # the last sum is the total: it is written once, divided
                is_finite = kernels_for(result).add_and_divide(parts[i], parts[j], divisor, result)
            if not additions:
                is_finite = torch.isfinite(torch.div(parts[0], divisor, out=result).sum())
            self._block_is_finite.append(is_finite)
            for other in others:
                other.copy_(result)


def routes_of(plan: Plan, group: ProcessGroup) -> HostRoutes:
    """Return the ways of chunks under a plan, as this process sees them."""
    return HostRoutes(plan, group.hosts or range(group.size), group.rank, group.links)


def add_in_order(terms: Sequence[torch.Tensor], pairs: Pairs) -> None:
    """Add terms[j] to terms[i] for each pair (i, j), one block at a time."""
    for block in blocks(terms[0]) if pairs else ():
        for i, j in pairs:
            terms[i][block].add_(terms[j][block])
