"""The exchange of one virtual rank on one process: nothing is exchanged, and p.grad is divided by the weight."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from unisono.distributed.process_group import ProcessGroup
from unisono.exchange.base import Exchange, Spans, Weights
from unisono.exchange.buckets import finite
from unisono.exchange.gradient_accumulation import GradientMemory, may_share_storage


class SingleProcess(Exchange):
    """Divide autograd's own p.grad. The bits are those of a loop by hand that divides by the total weight."""

    promise = "exact"
    reason = "one virtual rank on one process"
    used: Sequence[bool] = ()
    touched = False  # micro-batches accumulate in the p.grad that the loop leaves, as in plain torch

    _entered = 0
    """The number of micro-batches in the step so far."""

    def __init__(self, params: Sequence[torch.nn.Parameter], virtual_ranks: int, group: ProcessGroup) -> None:
        assert virtual_ranks == group.size == 1
        self.params = params
        # The kernel of torch's GradScaler multiplies gradients of one dtype and checks them in one pass, which is the
        # fastest way. It sets `_found` to 1 if an element is not finite.
        self._fast = {(p.dtype, p.device) for p in params} == {(torch.float32, p.device) for p in params[:1]}
        self._found = torch.zeros((), device=params[0].device)
        self._factors: dict[float, torch.Tensor] = {}

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        """Accept a communication hook, which has nothing to do."""

    def begin(self, spans: Spans, pieces: Mapping[int, int], weights: Weights) -> None:
        self._entered = 0

    def enter(self, virtual_rank: int, *, last: bool) -> None:
        if self._entered == 1:  # the first micro-batch made the gradients, to which this one is the first to add
            self._separate()
        self._entered += 1

    def _separate(self) -> list[torch.Tensor]:
        """Let no gradients share memory, to which torch would write twice. Return the gradients."""
        grads = [grad for p in self.params if (grad := p.grad) is not None]
        if not may_share_storage(grads):
            return grads
        memory = GradientMemory()
        for number, p in enumerate(self.params):
            if p.grad is not None:
                p.grad = memory.claim(number, p.grad)
                self._fast &= not p.grad.is_sparse
        return [grad for p in self.params if (grad := p.grad) is not None]

    @property
    def sent(self) -> float:
        return 0.0

    def finish(self, weight: float) -> bool:
        grads = self._separate()
        inverse = 1.0 / weight if math.frexp(weight)[0] == 0.5 else 1.0  # a power of two: its inverse is exact
        if inverse * weight != 1.0 and grads:
            torch._foreach_div_(grads, weight)
        return self._multiply(grads, inverse) if self._fast else all(map(finite, grads))

    def _multiply(self, grads: list[torch.Tensor], factor: float) -> bool:
        """Multiply in place, and return whether all elements are finite."""
        multiplier = self._factors.get(factor)
        if multiplier is None:
            multiplier = self._factors[factor] = torch.tensor(factor, device=self._found.device)
        if grads:
            torch._amp_foreach_non_finite_check_and_unscale_(grads, self._found, multiplier)
        if self._found.item() == 0.0:
            return True
        self._found.zero_()
        return False
