"""torch's DistributedDataParallel as the exchange: its Reducer and buckets, static graphs, and communication hooks.

The user's loop, and the model it calls, stay as they are. DistributedDataParallel is put around a module that holds the
parameters and computes nothing; its Reducer listens at the parameters themselves, so it does not mind whose forward
uses them. It is told about the last micro-batch of a step alone, which is what torch's `no_sync` does:

    micro-batches but the last     p.grad += gradient           nobody listens
    the last                       p.grad += gradient           the Reducer listens: a bucket is complete, it travels
    what has come to nothing       p.grad += 0                  so that every bucket travels, from every process

The third line is ours: a parameter that this process has not used (all of them, where a short batch has left it
nothing to do) gets a backward of zeros, so nothing has to be looked for in the graph as `find_unused_parameters` does.
Who adds what in which order is the library's to choose, so runs agree to rounding.

A user's hook (`run.register_comm_hook`) finds in each bucket what it finds under torch: a gradient whose average over
processes is the mean over the batch. So buckets are divided before it sees them, by a weight that processes tell each
other when the last backward begins. Without a hook that is done once, at the end.

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
from unisono.exchange.buckets import finite, gradient_modified_error

Hook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]
"""hook(state, bucket), as DistributedDataParallel.register_comm_hook takes it."""


class DdpExchange(Exchange):
    promise = "tolerance"
    reason = "exchange=ddp adds in an order that depends on the number of processes; exchange=tree does not"

    def __init__(
        self, params: Sequence[torch.nn.Parameter], virtual_ranks: int, group: ProcessGroup, *, settings: DdpSettings
    ) -> None:
        self.params, self.group, self.settings = params, group, settings
        self._used = [False] * len(params)
        self._hook: tuple[Any, Hook] | None = None
        self._torchs: DistributedDataParallel | None = None
        self._handles = [p.register_post_accumulate_grad_hook(self._seen(n)) for n, p in enumerate(params)]
        self._inside = self._last = False
        self._end: torch.Tensor | None = None  # what the Reducer's backward ends in

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Before the first step."""
        self._hook = state, hook

    def begin(self, spans: Spans, pieces: Mapping[int, int], weights: Weights) -> None:
        self._weights = weights
        self._factor: float | None = None  # what a bucket is multiplied by before the user's hook
        self._used = [False] * len(self.params)
        self._fired = [False] * len(self.params)
        self._left: list[tuple[int, int] | None] = [None] * len(self.params)  # p.grad, as autograd has left it
        self._changed = False  # by the loop
        self.zero()

    def enter(self, virtual_rank: int, *, last: bool) -> None:
        self._fired = [False] * len(self.params)
        self._inside, self._last = True, last
        if last:
            self._listen()

    def leave(self) -> None:
        self._inside = False
        if self._last:
            return
        if self._changed or list(map(_state_of, self.params)) != self._left:
            raise gradient_modified_error()

    def launch(self) -> None:
        """What this process has used by now is on its way: let the rest go too."""
        if self.group.size == 1:
            return
        if not self._last:  # nothing was computed here
            self._listen()
        silent = [p for p, fired in zip(self.params, self._fired, strict=True) if not fired]
        assert self._end is not None
        ends = [self._end, *(p.view_as(p) for p in silent)]
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
        """What a hook sends is its own affair."""
        size = sum(p.grad.nbytes for p in self.params if p.grad is not None)
        return all_reduce_bytes(size, self.group) if self._hook is None else math.nan

    @property
    def used(self) -> Sequence[bool]:
        return self._used

    @property
    def touched(self) -> bool:
        return False  # in the last micro-batch the Reducer itself changes p.grad, before anybody could look

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self.zero()
        if self._torchs is not None:
            # It holds the process group, which must not end with it: gloo's threads are joined then, while Python is
            # locked, and may be waiting for that lock (seen in a loop by hand that did so). The first forward of the
            # first one in a process leaves it in a cycle.
            self._torchs = self._end = None
            gc.collect()

    # -- torch's

    def _listen(self) -> None:
        """The next backward is the one that the Reducer is to hear."""
        if self.group.size == 1:
            return
        if self._torchs is None:
            self._torchs = self._build()
        with torch.enable_grad():
            self._end = self._torchs()

    def _build(self) -> DistributedDataParallel:
        """In the first step, and not before: a static graph counts what it hears in the first backward."""
        built = DistributedDataParallel(
            ParameterHolder(self.params),
            process_group=self.group.handle or dist.group.WORLD,
            bucket_cap_mb=self.settings.bucket_mb,
            static_graph=self.settings.static_graph,
            gradient_as_bucket_view=True,
            init_sync=False,  # run.place has seen to that
        )
        if self._hook is not None:
            # torch looks at a hook's annotations as they stand there, and takes text for another type
            built.register_comm_hook(self, lambda exchange, bucket: _mean_first(exchange, bucket))
        return built

    def _seen(self, number: int) -> Callable[[torch.Tensor], None]:
        def fire(p: torch.Tensor) -> None:
            if not self._inside:
                return
            self._used[number] = self._fired[number] = True
            if self._last:
                return
            before, now = self._left[number], _state_of(p)
            if before is not None and now is not None:
                self._changed |= now != (before[0], before[1] + 1)
            self._left[number] = now

        return fire

    def mean(self, bucket: torch.Tensor) -> None:
        """Make its average over processes the mean over the batch."""
        if self._factor is None:
            total = float(self.group.sum_(self._weights().sum().reshape(1)))
            self._factor = self.group.size / total if total else 1.0
        bucket.mul_(self._factor)

    @property
    def hook(self) -> tuple[Any, Hook]:
        assert self._hook is not None
        return self._hook


def _mean_first(exchange: DdpExchange, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """The user's hook, over a gradient that is a mean. Also called from inside backward."""
    exchange.mean(bucket.buffer())
    state, hook = exchange.hook
    return hook(state, bucket)


def _state_of(p: torch.Tensor) -> tuple[int, int] | None:
    """Which tensor p.grad is, and how often it has been written to; None, where autograd may make a new one of it."""
    return None if p.grad is None or p.grad.is_sparse else (id(p.grad), p.grad._version)


class ParameterHolder(nn.Module):
    """Parameters, and a result that depends on none of them, for DistributedDataParallel to be around."""

    def __init__(self, params: Sequence[torch.nn.Parameter]) -> None:
        super().__init__()
        self.params = nn.ParameterList(params)
        self.start = torch.zeros(1, device=params[0].device, requires_grad=True)  # what a static graph's end hangs on

    def forward(self) -> torch.Tensor:
        return self.start.clone()
