"""Magnitude pruning: weights with the smallest absolute values become zero."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from unisono.distributed.process_group import to_local
from unisono.pruning.scored_pruning import ScoredPruning
from unisono.pruning.sparsity_schedule import SparsitySchedule


class MagnitudePruning(ScoredPruning):
    """Set the weights with the smallest absolute values to zero, more and more of them, and keep them there.

        pruning = unisono.pruning.MagnitudePruning(model, sparsity=0.8, begin=100, end=900, every=50)
        run.track(model=model, optimizer=optimizer, pruning=pruning)
        ...
        step.update(optimizer, pruning)

    After update `t`, if t is `begin`, `begin + every`, ... or `end`, a fraction of the weights is zero, which grows as

        sparsity + (initial - sparsity) * (1 - (t - begin) / (end - begin)) ** 3

    (Zhu and Gupta 2017, arXiv 1710.01878). The number of zeros is that fraction of the elements, rounded. Of equal
    values, those with a lower index are pruned first. A pruned weight stays zero.

    Args:
        model: The model that `run.place` returned.
        sparsity: The fraction of zeros at `end` and after it, 0 to 1.
        begin: The number of updates after which weights are pruned for the first time, at least 1.
        end: The number of updates after which they are pruned for the last time.
        every: The number of updates between two prunings.
        initial: The fraction of zeros at `begin`.
        names: Names of the parameters to prune, in which `*` stands for any text. By default all that train and have
            at least two dims. Those with fewer (biases, norms) are never pruned.
        scope: "tensor": every parameter gets this sparsity. "global": all of them together do.

    Raises:
        LoopError: An argument is out of range, or no parameter matches.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        sparsity: float,
        begin: int,
        end: int,
        every: int = 1,
        initial: float = 0.0,
        names: Sequence[str] | None = None,
        scope: Literal["tensor", "global"] = "tensor",
    ) -> None:
        super().__init__(model, SparsitySchedule(sparsity, begin, end, every, initial), names, scope)

    def _scores(self, name: str) -> torch.Tensor:
        weights: torch.Tensor = to_local(self.params[name])
        return weights.abs().masked_fill_(to_local(self.pruned[name]), -1.0)  # pruned weights stay pruned
