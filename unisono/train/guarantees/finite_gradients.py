"""Find gradients that are not finite: NaN or infinity, in what the exchange made or the loop has written since."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_

import torch

from unisono.distributed.process_group import ProcessGroup, is_dtensor, to_local
from unisono.exchange.buckets import finite, versions_of


class FiniteCheck:
    """Check the gradients of some parameters for elements that are not finite.

    The exchange finds out whether the gradients that it makes are finite, since it reads them anyway. They are read
    again only if the loop has written to them since.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter]) -> None:
        self._params = params
        self._is_divided = any(map(is_dtensor, params))
        self._grads: list[torch.Tensor] = []  # when they became whole
        self._versions: list[int] = []  # of these

    def note(self) -> None:
        """Note the gradients, which have become whole."""
        self._grads = [grad for p in self._params if (grad := p.grad) is not None]
        self._versions = self._versions_of(self._grads)

    def find(self, names: Mapping[int, str], group: ProcessGroup, *, was_finite: bool) -> str:
        """Describe the first parameter whose gradient is not finite, the same on all processes; "": there is none.

        Args:
            names: of parameters, by id.
            group: all processes that hold a part of a gradient.
            was_finite: whether the whole gradients were finite, on all processes.
        """
        noted, self._grads = self._grads, []
        grads = [grad for p in self._params if (grad := p.grad) is not None]
        untouched = len(noted) == len(grads) and all(map(is_, grads, noted))
        if was_finite and untouched and self._versions_of(grads) == self._versions:
            return ""
        found = next((_describe(p, names) for p in self._params if not _is_finite(p)), "")
        if not was_finite:  # all processes know that, but it may be in the part of another one
            found = next((other for other in group.all_gather_object(found) if other), "")
        return found

    def _versions_of(self, grads: Sequence[torch.Tensor]) -> list[int]:
        return versions_of(map(to_local, grads) if self._is_divided else grads)


def _describe(p: torch.nn.Parameter, names: Mapping[int, str]) -> str:
    """Describe a parameter whose gradient is not finite."""
    assert p.grad is not None
    count = int((~torch.isfinite(to_local(p.grad).to_dense())).sum())
    return f"{names.get(id(p), 'A parameter')} of shape {tuple(p.shape)} is the first that has {count}"


def _is_finite(p: torch.nn.Parameter) -> bool:
    return p.grad is None or finite(to_local(p.grad))
