"""The plain way: one gradient copy a process and the library's own all-reduce, in buckets, while backward still runs.

The mathematics are the tree's (sums of losses, divided once by the total weight), but who adds what in which order
depends on how many processes there are and on the library. Runs agree to rounding, not to the bit, and say so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from unisono.distributed.process_group import ProcessGroup, Work, wait_for
from unisono.exchange.base import Spans, Weights, all_reduce_bytes
from unisono.exchange.buckets import BucketedExchange, BucketLayout, BucketReadiness, FlatGradient, divide_


class AllReduce(BucketedExchange):
    promise = "tolerance"
    reason = "exchange=allreduce adds in an order that depends on the number of processes; exchange=tree does not"

    def __init__(self, params: Sequence[torch.nn.Parameter], virtual_ranks: int, group: ProcessGroup) -> None:
        self.params = params
        self.group = group
        self.layout = BucketLayout(params, group.size)
        self.ready = BucketReadiness(self.layout, self._launch)
        self.sum = FlatGradient(self.layout)
        self._works: list[Work] = []

    def begin(self, spans: Spans, pieces: Mapping[int, int], weights: Weights) -> None:
        self.ready.begin()
        self.sum.clear()

    def enter(self, virtual_rank: int, *, last: bool) -> None:
        self.ready.enter(self.sum, tell=False, last=last, launch=last and self.group.size > 1)

    def leave(self) -> None:
        self.ready.leave()

    def launch(self) -> None:
        self.sum.complete()
        self.ready.launch_rest()

    def finish(self, weight: float) -> bool:
        wait_for(self._works)
        self._works = []
        finite = [divide_(flat, weight) for flat in self.sum.flats]
        self.sum.assign_gradients(self.params)
        return all(finite)

    @property
    def sent(self) -> float:
        return all_reduce_bytes(self.layout.bytes_of_all, self.group)

    def _launch(self, bucket: int) -> None:
        if self.group.size > 1:
            self._works.append(self._begin(self.sum.flats[bucket]))

    def _begin(self, flat: torch.Tensor) -> Work:
        """Begin to sum a bucket over all processes, in place."""
        return self.group.all_reduce(flat)
