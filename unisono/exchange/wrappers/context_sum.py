"""Slices: the gradient of sequences that several processes share (parallel/context_parallel/ulysses.py). Another
exchange, and one sum.

Parameters are whole on every process of the axis, and each has the gradient of its own positions:

                    tree, over other samples       one sum over slices, one division
    slice 0         v0 + v1 + v2 + ...  = a   ---+
                                                 +-->   (a + b) / weight     on both
    slice 1         v0 + v1 + v2 + ...  = b   ---+

The exchange of each slice adds up what the virtual ranks made of it, with the bits that it has on any number of
processes along the axes of data, and divides by nothing. The sum over the slices is in their order, so it keeps these
bits; but two half sequences are not added up as a whole one is, so beside one process it is right to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from unisono.distributed.process_group import ProcessGroup, to_local
from unisono.exchange.base import Exchange, Spans, Weights, all_reduce_bytes
from unisono.exchange.buckets import BUCKET_BYTES, divide_
from unisono.exchange.wrappers.exchange_wrapper import ExchangeWrapper


class ContextSum(ExchangeWrapper):
    """`inner` exchanges along the axes of data, where our span is number `place`; `slices` is the axis of context."""

    def __init__(self, inner: Exchange, params: Sequence[torch.nn.Parameter], slices: ProcessGroup, place: int) -> None:
        self.inner, self.params, self.slices, self.place = inner, params, slices, place
        self.promise, self.reason = inner.promise, inner.reason
        self._used: Sequence[bool] = ()

    def begin(self, spans: Spans, pieces: Mapping[int, int], weights: Weights) -> None:
        """The weights of a slice are not all there is to divide by: the sum of them that the exchange gets is 1."""
        first, end = spans[self.place] if self.place < len(spans) else (0, 0)

        def one() -> torch.Tensor:
            row = torch.zeros(end - first, dtype=torch.float64, device=self.slices.device)
            row[: 1 if first == 0 else 0] = 1.0
            return row

        self.inner.begin(spans, pieces, one)

    def launch(self) -> None:
        self.inner.launch()
        used = self.inner.used or [p.grad is not None for p in self.params]
        told = torch.tensor(used, dtype=torch.uint8, device=self.slices.device)
        self._used = list(map(bool, self.slices.max_(told).tolist()))

    @property
    def used(self) -> Sequence[bool]:
        return self._used

    def finish(self, weight: float) -> bool:
        self.inner.finish(1.0)
        for p, used in zip(self.params, self.used, strict=True):
            if used and p.grad is None:  # another slice has used it
                p.grad = torch.zeros_like(p)
        whole, self._bytes = True, 0
        for some in self._some():
            self._bytes += sum(grad.nbytes for grad in some)
            flat = self.slices.deterministic_all_reduce(torch.cat([grad.reshape(-1) for grad in some]))
            whole &= divide_(flat, weight)
            for grad, mean in zip(some, flat.split([grad.numel() for grad in some]), strict=True):
                grad.copy_(mean.view_as(grad))
        return whole

    def _some(self) -> Iterator[list[torch.Tensor]]:
        """What this process holds of the gradients, as much at once as is worth a message; the same on every slice."""
        some: list[torch.Tensor] = []
        for p in self.params:
            if p.grad is None:
                continue
            if p.grad.layout is not torch.strided:
                p.grad = p.grad.to_dense()
            grad: torch.Tensor = to_local(p.grad)
            if some and ((grad.dtype, grad.device) != (some[0].dtype, some[0].device) or self._full(some)):
                yield some
                some = []
            some.append(grad)
        if some:
            yield some

    @staticmethod
    def _full(some: Sequence[torch.Tensor]) -> bool:
        return sum(grad.nbytes for grad in some) >= BUCKET_BYTES

    @property
    def sent(self) -> float:
        """To other slices, a chunk of our sum to each, and the sum of ours: what an all-reduce sends."""
        return self.inner.sent + all_reduce_bytes(self._bytes, self.slices)

    @property
    def plain(self) -> float:
        return self.sent
