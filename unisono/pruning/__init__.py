"""Prune a model while it trains: set a growing part of its weights to zero, and keep them there.

    pruning = unisono.pruning.MagnitudePruning(model, sparsity=0.8, begin=100, end=900, every=50)
    run.track(model=model, optimizer=optimizer, pruning=pruning)
    for step in run.steps(data):
        step.run(model, loss_fn)
        step.update(optimizer, pruning)

Which weights are pruned is computed from whole tensors, with ties broken by index. So the result does not depend on the
number of processes or on shards.
"""

from unisono.pruning.magnitude import MagnitudePruning
from unisono.pruning.movement import MovementPruning
from unisono.pruning.semi_structured import SemiStructuredPruning

__all__ = ["MagnitudePruning", "MovementPruning", "SemiStructuredPruning"]
