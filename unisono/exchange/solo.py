"""One virtual rank on one process: nothing to exchange. Autograd's own p.grad, divided by the weight; that is all."""

from __future__ import annotations

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
        self._kinds: set[tuple[torch.dtype, torch.device]] = set()
        self._one: dict[torch.device, torch.Tensor] = {}
        self._found: dict[torch.device, torch.Tensor] = {}

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
        if self._grads:
            torch._foreach_div_(self._grads, weight)

    def commit(self) -> None:
        pass

    def zero(self) -> None:
        for p in self.params:
            p.grad = None
        self._grads = []

    def finite(self) -> bool:
        """Whether every element of the gradient is finite: the check of torch's GradScaler, with a scale of 1."""
        kinds = {(g.dtype, g.device) for g in self._grads}
        if kinds != self._kinds:
            self._kinds = kinds
            self._one = {d: torch.ones((), device=d) for _, d in kinds}
            self._found = {d: torch.zeros((), device=d) for _, d in kinds}
        for kind in kinds:
            device = kind[1]
            same = self._grads if len(kinds) == 1 else [g for g in self._grads if (g.dtype, g.device) == kind]
            torch._amp_foreach_non_finite_check_and_unscale_(same, self._found[device], self._one[device])
        if any(found.item() for found in self._found.values()):
            self._kinds = set()
            return False
        return True

    def close(self) -> None:
        pass
