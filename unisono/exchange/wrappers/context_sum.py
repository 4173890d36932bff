"""Average gradients of sequences that several processes share (parallel/context_parallel/ulysses.py).

Each process of the axis `context` has whole parameters, and the gradient of its own positions. Another exchange adds up
samples; then one sum adds up slices:

                    tree, over other samples       one sum over slices, one division
    slice 0         v0 + v1 + v2 + ...  = a   ---+
                                                 +-->   (a + b) / weight     on both
    slice 1         v0 + v1 + v2 + ...  = b   ---+

The exchange of each slice adds up its virtual ranks, with the bits that it has on any number of data-parallel
processes, and divides by 1. The sum over slices is in the order of ranks, so it keeps these bits. But two half
sequences are not added up as a whole one is, so the result agrees with that of one process to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from unisono.distributed.process_group import ProcessGroup, to_local
from unisono.exchange.base import Exchange, Spans, Weights, all_reduce_bytes
from unisono.exchange.buckets import BUCKET_BYTES
from unisono.exchange.kernels.elementwise import divide_
from unisono.exchange.wrappers.exchange_wrapper import ExchangeWrapper


class ContextSum(ExchangeWrapper):
    """Sum gradients over slices of sequences after another exchange.

    Args:
        inner: The exchange along the axes of data.
        params: The parameters.
        slices: The processes of the axis `context`.
        place: The number of this process's span along the axes of data.
    """

    def __init__(self, inner: Exchange, params: Sequence[torch.nn.Parameter], slices: ProcessGroup, place: int) -> None:
        self.inner, self.params, self.slices, self.place = inner, params, slices, place
        self.promise, self.reason = inner.promise, inner.reason
        self._used: Sequence[bool] = ()

    def begin(self, spans: Spans, pieces: Mapping[int, int], weights: Weights) -> None:
        """Begin a step of the inner exchange with a total weight of 1, because a slice's weight is only a part."""
        first, end = spans[self.place] if self.place < len(spans) else (0, 0)

        def one() -> torch.Tensor:
            row = torch.zeros(end - first, dtype=torch.float64, device=self.slices.device)
            row[: 1 if first == 0 else 0] = 1.0
            return row

        self.inner.begin(spans, pieces, one)

    def launch(self) -> None:
        self.inner.launch()
        used = self.inner.used or [p.grad is not None for p in self.params]
        message = torch.tensor(used, dtype=torch.uint8, device=self.slices.device)
        self._used = list(map(bool, self.slices.max_(message).tolist()))

    @property
    def used(self) -> Sequence[bool]:
        return self._used

    def finish(self, weight: float) -> bool:
        self.inner.finish(1.0)
        for p, used in zip(self.params, self.used, strict=True):
            if used and p.grad is None:  # another slice has used it
                p.grad = torch.zeros_like(p)
        is_finite, self._bytes = True, 0
        for bucket in self._buckets():
            self._bytes += sum(grad.nbytes for grad in bucket)
            flat = self.slices.deterministic_all_reduce(torch.cat([grad.reshape(-1) for grad in bucket]))
            is_finite &= divide_([flat], weight)
            for grad, mean in zip(bucket, flat.split([grad.numel() for grad in bucket]), strict=True):
                grad.copy_(mean.view_as(grad))
        return is_finite

    def _buckets(self) -> Iterator[list[torch.Tensor]]:
        """Yield this process's gradients in buckets of one dtype and device; the same buckets on every slice."""
        bucket: list[torch.Tensor] = []
        for p in self.params:
            if p.grad is None:
                continue
            if p.grad.layout is not torch.strided:
                p.grad = p.grad.to_dense()
            grad: torch.Tensor = to_local(p.grad)
            if bucket and ((grad.dtype, grad.device) != (bucket[0].dtype, bucket[0].device) or self._is_full(bucket)):
                yield bucket
                bucket = []
            bucket.append(grad)
        if bucket:
            yield bucket

    @staticmethod
    def _is_full(bucket: Sequence[torch.Tensor]) -> bool:
        return sum(grad.nbytes for grad in bucket) >= BUCKET_BYTES

    @property
    def sent(self) -> float:
        """Bytes of the inner exchange, and of an all-reduce over the slices."""
        return self.inner.sent + all_reduce_bytes(self._bytes, self.slices)

    @property
    def plain(self) -> float:
        return self.sent
