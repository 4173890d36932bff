"""torch's DistributedDataParallel as the exchange: its Reducer and buckets, static graphs, and communication hooks.

The user's loop and model stay as they are. DistributedDataParallel wraps a module that holds the parameters and
computes nothing. Its Reducer hooks the parameters themselves, so it works with any forward that uses them. It takes
part in the last micro-batch of a step only, as with torch's `no_sync`:

    micro-batches but the last     p.grad += gradient           the Reducer is off
    the last                       p.grad += gradient           the Reducer sends each bucket that is complete
    parameters without a gradient  p.grad += 0                  so that every process sends every bucket

The third line is ours. A parameter that this process has not used (all of them, where a short batch has left it without
micro-batches) gets a backward of zeros, so the graph need not be searched as `find_unused_parameters` does. torch
decides the order of additions, so runs agree to rounding.

A user's hook (`run.register_comm_hook`) finds in each bucket what it finds under torch: a gradient whose average over
processes is the mean over the batch. So buckets are divided before the hook sees them, by the total weight, which
processes exchange when the last backward begins. Without a hook gradients are divided once, at the end.

https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from unisono.config import DdpSettings
from unisono.distributed.process_group import ProcessGroup
from unisono.exchange.base import Exchange, Spans, Weights, all_reduce_bytes
from unisono.exchange.bucket_readiness import gradient_modified_error
from unisono.exchange.buckets import finite, version_of

Hook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]
"""hook(state, bucket), as DistributedDataParallel.register_comm_hook takes it."""


class DdpExchange(Exchange):
    """Average gradients with DistributedDataParallel."""

    promise = "tolerance"
    reason = "exchange=ddp adds in an order that depends on the number of processes; exchange=tree does not"

    def __init__(
        self, params: Sequence[torch.nn.Parameter], virtual_ranks: int, group: ProcessGroup, *, settings: DdpSettings
    ) -> None:
        self.params, self.group, self.settings = params, group, settings
        self._used = [False] * len(params)
        self._hook: tuple[Any, Hook] | None = None
        self._ddp: DistributedDataParallel | None = None
        self._handles = [p.register_post_accumulate_grad_hook(self._hook_of(n)) for n, p in enumerate(params)]
        self._inside = self._last = False
        self._end: torch.Tensor | None = None  # the output of DistributedDataParallel's forward

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Register a communication hook, before the first step."""
        self._hook = state, hook

    def begin(self, spans: Spans, pieces: Mapping[int, int], weights: Weights) -> None:
        self._weights = weights
        self._factor: float | None = None  # by which a bucket is multiplied before the user's hook
        self._used = [False] * len(self.params)
        self._fired = [False] * len(self.params)
        self._versions: list[tuple[int, int] | None] = [None] * len(self.params)  # of p.grad, as autograd has left it
        self._changed = False  # whether the loop has changed p.grad
        self.zero()

    def enter(self, virtual_rank: int, *, last: bool) -> None:
        self._fired = [False] * len(self.params)
        self._inside, self._last = True, last
        if last:
            self._prepare_reducer()

    def leave(self) -> None:
        self._inside = False
        if self._last:
            return
        if self._changed or list(map(_identity_and_version, self.params)) != self._versions:
            raise gradient_modified_error()

    def launch(self) -> None:
        """Send the gradients of parameters that this process has not used, as zeros."""
        if self.group.size == 1:
            return
        if not self._last:  # this process has computed nothing
            self._prepare_reducer()
        unused = [p for p, fired in zip(self.params, self._fired, strict=True) if not fired]
        assert self._end is not None
        ends = [self._end, *(p.view_as(p) for p in unused)]
        torch.autograd.backward(ends, [torch.zeros_like(end) for end in ends])
        self._last = False

    def finish(self, weight: float) -> bool:
        size = self.group.size
        divisor = weight / size if self._factor is None else 1.0  # the Reducer has divided by the number of processes
        for p in self.params:
            if p.grad is not None and divisor != 1.0:
                p.grad.div_(divisor)
        return all(finite(p.grad) for p in self.params if p.grad is not None)

    @property
    def sent(self) -> float:
        """Bytes of an all-reduce; NaN with a hook, whose traffic is not known."""
        size = sum(p.grad.nbytes for p in self.params if p.grad is not None)
        return all_reduce_bytes(size, self.group) if self._hook is None else math.nan

    @property
    def used(self) -> Sequence[bool]:
        return self._used

    @property
    def touched(self) -> bool:
        return False  # in the last micro-batch the Reducer itself changes p.grad, before the loop could

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self.zero()
        if self._ddp is not None:
            # It holds the process group, which must not end together with it: gloo's threads would be joined while the
            # GIL is held, and may be waiting for it (seen in a loop by hand that did so). The first forward of the
            # first DistributedDataParallel in a process leaves it in a reference cycle.
            self._ddp = self._end = None
            gc.collect()

    # -- DistributedDataParallel

    def _prepare_reducer(self) -> None:
        """Let the Reducer take part in the next backward."""
        if self.group.size == 1:
            return
        if self._ddp is None:
            self._ddp = self._build()
        with torch.enable_grad():
            self._end = self._ddp()

    def _build(self) -> DistributedDataParallel:
        """Wrap the parameters. Not before the first step: a static graph counts hooks in the first backward."""
        ddp = DistributedDataParallel(
            ParameterHolder(self.params),
            process_group=self.group.handle or dist.group.WORLD,
            bucket_cap_mb=self.settings.bucket_mb,
            static_graph=self.settings.static_graph,
            gradient_as_bucket_view=True,
            init_sync=False,  # run.place has broadcast the parameters
        )
        if self._hook is not None:
            # a lambda: torch compares a hook's annotations with types, and ours are strings
            ddp.register_comm_hook(self, lambda exchange, bucket: _mean_first(exchange, bucket))
        return ddp

    def _hook_of(self, number: int) -> Callable[[torch.Tensor], None]:
        def on_gradient(p: torch.Tensor) -> None:
            if not self._inside:
                return
            self._used[number] = self._fired[number] = True
            if self._last:
                return
            before, now = self._versions[number], _identity_and_version(p)
            if before is not None and now is not None:
                self._changed |= now != (before[0], before[1] + 1)
            self._versions[number] = now

        return on_gradient

    def mean(self, bucket: torch.Tensor) -> None:
        """Scale a bucket so that its average over processes is the mean over the batch."""
        if self._factor is None:
            total = float(self.group.sum_(self._weights().sum().reshape(1)))
            self._factor = self.group.size / total if total else 1.0
        bucket.mul_(self._factor)

    @property
    def hook(self) -> tuple[Any, Hook]:
        assert self._hook is not None
        return self._hook


def _mean_first(exchange: DdpExchange, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Scale a bucket, then call the user's hook. Also called from inside backward."""
    exchange.mean(bucket.buffer())
    state, hook = exchange.hook
    return hook(state, bucket)


def _identity_and_version(p: torch.Tensor) -> tuple[int, int] | None:
    """Return the id and the version of p.grad; None where autograd may replace it by a new tensor."""
    return None if p.grad is None or p.grad.is_sparse else (id(p.grad), version_of(p.grad))


class ParameterHolder(nn.Module):
    """A module for DistributedDataParallel to wrap: it holds parameters, and its output depends on none of them."""

    def __init__(self, params: Sequence[torch.nn.Parameter]) -> None:
        super().__init__()
        self.params = nn.ParameterList(params)
        self.start = torch.zeros(1, device=params[0].device, requires_grad=True)  # a static graph needs a root

    def forward(self) -> torch.Tensor:
        return self.start.clone()
