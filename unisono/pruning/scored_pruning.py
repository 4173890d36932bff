"""Prune the weights with the lowest scores, of each tensor or of all tensors together."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import reduce
from math import prod
from typing import Any

import torch

from unisono.checkpoint.sharded_state import gather_tensor
from unisono.distributed.process_group import from_local_like
from unisono.errors import LoopError
from unisono.pruning.pruned_weights import PrunedWeights
from unisono.pruning.selection import choose, lowest, matrices
from unisono.pruning.sparsity_schedule import SparsitySchedule

SCOPES = ("tensor", "global")


class ScoredPruning(PrunedWeights):
    """Weights that are pruned by scores. See MagnitudePruning and MovementPruning for the arguments."""

    def __init__(
        self,
        model: torch.nn.Module,
        schedule: SparsitySchedule,
        names: Sequence[str] | None,
        scope: str,
    ) -> None:
        if scope not in SCOPES:
            raise LoopError(
                f"There is no scope {scope!r}.", f"The scopes are {' and '.join(SCOPES)}.", 'scope="tensor".'
            )
        params: Mapping[str, Any] = matrices(model)
        super().__init__(params if names is None else choose(params, names, model), schedule, {"scope": scope})
        self.scope = scope

    @abstractmethod
    def _scores(self, name: str) -> torch.Tensor:
        """Return the scores of the local part of a parameter."""

    def _choose(self, sparsity: float) -> None:
        if self.scope == "tensor":
            for name, p in self.params.items():
                self._prune(name, lowest(self._whole_scores(name), round(sparsity * p.numel())))
            return
        found = [self._whole_scores(name) for name in self.params]
        dtype, device = reduce(torch.promote_types, [scores.dtype for scores in found]), found[0].device
        chosen = torch.cat([scores.reshape(-1).to(device, dtype) for scores in found])
        chosen = lowest(chosen, round(sparsity * len(chosen)))
        parts = chosen.split([prod(p.shape) for p in self.params.values()])
        for (name, p), part in zip(self.params.items(), parts, strict=True):
            self._prune(name, part.view(p.shape))

    def _whole_scores(self, name: str) -> torch.Tensor:
        whole: torch.Tensor = gather_tensor(from_local_like(self._scores(name), self.params[name]))
        return whole
