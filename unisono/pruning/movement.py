"""Movement pruning: weights that move toward zero during training become zero."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from unisono.distributed.process_group import to_local
from unisono.errors import LoopError
from unisono.pruning.scored_pruning import ScoredPruning
from unisono.pruning.sparsity_schedule import SparsitySchedule


class MovementPruning(ScoredPruning):
    """Set the weights that move toward zero to zero (Sanh et al. 2020, arXiv 2005.07683).

        pruning = unisono.pruning.MovementPruning(model, optimizer, sparsity=0.8, begin=100, end=900, every=50)
        run.track(model=model, optimizer=optimizer, pruning=pruning)
        ...
        step.update(optimizer, pruning)

    The score of a weight is the sum of `-weight * gradient` over all updates. The weights with the lowest scores are
    pruned, on the schedule of MagnitudePruning. `gradient` is the mean gradient of the step, after clipping, and
    `weight` the value before the optimizer steps.

    A pruned weight keeps the value that it had, and its score continues to change (the straight-through estimator of
    the paper, without a parametrization of the model). If its score rises again, the weight returns with that value.
    This takes memory: per weight 4 bytes for the score (8 in float64), one value and 1 byte for the mask.

    Args:
        model: The model that `run.place` returned.
        optimizer: The optimizer that updates the parameters. Scores change when it steps.
        sparsity: The fraction of zeros at `end` and after it, 0 to 1.
        begin: The number of updates after which weights are pruned for the first time, at least 1.
        end: The number of updates after which they are pruned for the last time.
        every: The number of updates between two prunings.
        initial: The fraction of zeros at `begin`.
        names: Names of the parameters to prune, in which `*` stands for any text. By default all that train and have
            at least two dims. Those with fewer (biases, norms) are never pruned.
        scope: "tensor": every parameter gets this sparsity. "global": all of them together do.

    Raises:
        LoopError: An argument is out of range, no parameter matches, or the optimizer does not update one of them.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
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
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        foreign = [name for name, p in self.params.items() if id(p) not in held]
        if foreign:
            raise LoopError(
                f"The {type(optimizer).__name__} does not update all parameters that are to be pruned.",
                f"{len(foreign)} of {len(self.params)} are not in its groups; the first is {foreign[0]}.",
                "pass the optimizer of these parameters, or names=[...] of those that it has.",
            )
        self.scores = {
            name: self._like(p, torch.promote_types(p.dtype, torch.float32)) for name, p in self.params.items()
        }
        self.values = {name: self._like(p, p.dtype) for name, p in self.params.items()}
        optimizer.register_step_pre_hook(self._add_scores)

    @torch.no_grad()
    def _add_scores(self, *_: Any) -> None:
        for name, p in self.params.items():
            if p.grad is not None:
                scores = to_local(self.scores[name])
                scores.sub_(self._dense(name).to(scores.dtype) * to_local(p.grad).to(scores.dtype))

    def _dense(self, name: str) -> torch.Tensor:
        """Return the local part of a parameter, with the values that pruned weights had."""
        return torch.where(to_local(self.pruned[name]), to_local(self.values[name]), to_local(self.params[name]))

    def _scores(self, name: str) -> torch.Tensor:
        scores: torch.Tensor = to_local(self.scores[name])
        return scores

    def _prune(self, name: str, chosen: torch.Tensor) -> None:
        dense = self._dense(name)
        super()._prune(name, chosen)
        to_local(self.params[name]).copy_(dense)  # `step` sets those that are pruned to zero
        to_local(self.values[name]).copy_(dense.masked_fill_(to_local(self.pruned[name]).logical_not(), 0.0))

    def _tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        return {**super()._tensors(), "scores": self.scores, "values": self.values}
