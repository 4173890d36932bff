"""One virtual rank on one process: nothing to exchange. Autograd's own p.grad, divided by the weight; that is all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from unisono.distributed.process_group import ProcessGroup
from unisono.exchange.base import Exchange
from unisono.exchange.buckets import finite


class SingleProcess(Exchange):
    """Bit-equal to the loop one writes by hand: sum loss, backward, gradients divided by the total weight."""

    promise = "exact"
    reason = "one virtual rank on one process"
    used: Sequence[bool] = ()
    touched = False  # one micro-batch after the other adds to p.grad as the loop leaves it: plain torch

    def __init__(self, params: Sequence[torch.nn.Parameter], virtual_ranks: int, group: ProcessGroup) -> None:
        assert virtual_ranks == group.size == 1
        self.params = params
        # The kernel of torch's GradScaler multiplies all gradients and looks at them, if they are of one kind: the
        # quickest there is. It leaves a 1 in `_found` when an element is not finite.
        self._fast = {(p.dtype, p.device) for p in params} == {(torch.float32, p.device) for p in params[:1]}
        self._found = torch.zeros((), device=params[0].device)
        self._factors: dict[float, torch.Tensor] = {}

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        """Of torch's DistributedDataParallel: nothing travels, so there is nothing for it to do."""

    @property
    def sent(self) -> float:
        return 0.0

    def finish(self, weight: float) -> bool:
        grads = []
        for p in self.params:
            if (grad := p.grad) is not None:
                grads.append(grad)
                self._fast &= not grad.is_sparse
        inverse = 1.0 / weight if math.frexp(weight)[0] == 0.5 else 1.0  # a power of two: its inverse is exact
        if inverse * weight != 1.0 and grads:
            torch._foreach_div_(grads, weight)
        return self._multiply(grads, inverse) if self._fast else all(map(finite, grads))

    def _multiply(self, grads: list[torch.Tensor], by: float) -> bool:
        """Multiply and look: are they all finite?"""
        factor = self._factors.get(by)
        if factor is None:
            factor = self._factors[by] = torch.tensor(by, device=self._found.device)
        if grads:
            torch._amp_foreach_non_finite_check_and_unscale_(grads, self._found, factor)
        if self._found.item() == 0.0:
            return True
        self._found.zero_()
        return False
