"""One virtual rank on one process: nothing to exchange. Autograd's own p.grad, divided by the weight; that is all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from unisono.world.collectives import Group


class Solo:
    """Bit-equal to the loop one writes by hand: sum loss, backward, gradients divided by the total weight."""

    promise = "exact"
    reason = "one virtual rank on one process"

    def __init__(self, params: Sequence[torch.nn.Parameter], virtual_ranks: int, group: Group) -> None:
        assert virtual_ranks == group.size == 1
        self.params = params
        self.used: Sequence[bool] = ()
        self._grads: list[torch.Tensor] = []
        self._found: torch.Tensor | None = None  # 1 once an element was not finite; None: nobody has looked
        self._inverse: dict[float, torch.Tensor] = {}
        # one kernel looks at all gradients at once if they are of one kind; it is the one of torch's GradScaler
        self._alike = {(p.dtype, p.device) for p in params} in ({(torch.float32, p.device)} for p in params[:1])
        self._fast = self._alike

    def begin(self, spans: Sequence[tuple[int, int]], pieces: Mapping[int, int]) -> None:
        pass

    def enter(self, virtual_rank: int, *, last: bool) -> None:
        pass

    def leave(self) -> None:
        pass

    def launch(self, *, again: bool = False) -> None:
        pass

    def finish(self, weight: float) -> None:
        self._grads = [p.grad for p in self.params if p.grad is not None]
        self._found = None
        self._fast = self._alike and not any(grad.is_sparse for grad in self._grads)
        if self._fast and math.frexp(weight)[0] == 0.5:
            # dividing by a power of two is multiplying by its inverse, to the bit: the check divides on its way
            self._check(weight)
        elif self._grads:
            torch._foreach_div_(self._grads, weight)

    def _check(self, weight: float) -> None:
        inverse = self._inverse.get(weight)
        if inverse is None:
            inverse = self._inverse[weight] = torch.tensor(1.0 / weight, device=self.params[0].device)
        self._found = torch.zeros((), device=inverse.device)
        if self._grads:
            torch._amp_foreach_non_finite_check_and_unscale_(self._grads, self._found, inverse)

    def commit(self) -> None:
        pass

    def zero(self) -> None:
        for p in self.params:
            p.grad = None
        self._grads = []

    def finite(self) -> bool:
        """Whether every element of the gradient is finite; a read of it, if `finish` has not looked already."""
        if not self._fast:
            values = [grad.coalesce().values() if grad.is_sparse else grad for grad in self._grads]
            return all(bool(torch.isfinite(grad).all()) for grad in values)
        if self._found is None:
            self._check(1.0)
        assert self._found is not None
        return self._found.item() == 0.0

    def close(self) -> None:
        pass
