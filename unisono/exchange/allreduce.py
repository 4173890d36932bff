"""Average gradients with the library's own all-reduce: one gradient copy, in buckets, while backward still runs.

The computation is that of the tree: sums of losses, divided once by the total weight. But the order of additions
depends on the number of processes and on the library, so runs agree to rounding and not to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from unisono.distributed.process_group import ProcessGroup, Work, wait_for
from unisono.exchange.base import Spans, Weights, all_reduce_bytes
from unisono.exchange.bucket_readiness import BucketedExchange, BucketReadiness
from unisono.exchange.buckets import BucketLayout
from unisono.exchange.gradient_accumulation import FlatGradient
from unisono.exchange.kernels.elementwise import divide_


class AllReduce(BucketedExchange):
    """Average gradients with torch.distributed.all_reduce."""

    promise = "tolerance"
    reason = "exchange=allreduce adds in an order that depends on the number of processes; exchange=tree does not"

    def __init__(self, params: Sequence[torch.nn.Parameter], virtual_ranks: int, group: ProcessGroup) -> None:
        self.params = params
        self.group = group
        self.layout = BucketLayout(params, group.size)
        self.ready = BucketReadiness(self.layout, self._launch if group.size > 1 else None)
        self.sum = FlatGradient(self.layout)
        self._works: list[Work] = []

    def begin(self, spans: Spans, pieces: Mapping[int, int], weights: Weights) -> None:
        self.ready.begin()
        self.sum.clear()

    def enter(self, virtual_rank: int, *, last: bool) -> None:
        self.ready.enter(self.sum, notify=False, last=last, launch=last)

    def leave(self) -> None:
        self.ready.leave()

    def launch(self) -> None:
        self.sum.complete()
        self.ready.launch_rest()

    def finish(self, weight: float) -> bool:
        wait_for(self._works)
        self._works = []
        is_finite = divide_(self.sum.flats, weight)
        self.sum.assign_gradients(self.params)
        return is_finite

    @property
    def sent(self) -> float:
        return all_reduce_bytes(self.layout.bytes_of_all, self.group)

    def _launch(self, bucket: int) -> None:
        """Start to sum a bucket over all processes, in place."""
        self._works.append(self.group.all_reduce(self.sum.flats[bucket]))
