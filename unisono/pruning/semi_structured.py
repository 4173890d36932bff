"""2:4 sparsity: two of each four weights along the input dim are zero."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.checkpoint.sharded_state import gather_tensor
from unisono.errors import LoopError
from unisono.pruning.pruned_weights import PrunedWeights
from unisono.pruning.selection import choose, linear_weights, lowest_of_fours, matrices
from unisono.pruning.sparsity_schedule import SparsitySchedule


class SemiStructuredPruning(PrunedWeights):
    """Keep the two largest of each four weights along the input dim (2:4; Mishra et al. 2021, arXiv 2104.08378).

        pruning = unisono.pruning.SemiStructuredPruning(model, begin=500)
        run.track(model=model, optimizer=optimizer, pruning=pruning)
        ...
        step.update(optimizer, pruning)

    After update `begin` the two weights of each group with the smallest absolute values become zero and stay zero. The
    updates after it adapt the other weights, as in the paper. Of equal values, those with a lower index are pruned.

    Args:
        model: The model that `run.place` returned.
        begin: The number of updates after which the weights are pruned, at least 1.
        names: Names of the parameters to prune, in which `*` stands for any text: matrices [outputs, inputs]. By
            default the weights of all torch.nn.Linear that train and whose number of inputs is a multiple of 4.

    Raises:
        LoopError: `begin` is below 1, no parameter matches, or a named one has other than 4 k inputs.
    """

    def __init__(self, model: torch.nn.Module, *, begin: int, names: Sequence[str] | None = None) -> None:
        if names is None:
            chosen = {name: p for name, p in linear_weights(model).items() if p.shape[1] % 4 == 0}
        else:
            chosen = choose(matrices(model), names, model)
        for name, p in chosen.items():
            if p.dim() != 2 or p.shape[1] % 4:
                raise LoopError(
                    f"Cannot prune {name} to 2:4.",
                    f"Its shape is {tuple(p.shape)}; groups of four need a matrix with a multiple of 4 columns.",
                    "leave it out of names.",
                )
        super().__init__(chosen, SparsitySchedule(0.5, begin, begin), {})

    def _choose(self, sparsity: float) -> None:
        for name, p in self.params.items():
            self._prune(name, lowest_of_fours(gather_tensor(p.detach()).abs(), 2))
