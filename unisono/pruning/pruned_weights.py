"""Weights that are kept at zero: the part that all ways of pruning share.

    step.update(optimizer, pruning)
        the optimizer steps
        pruning.step()     at some updates: choose the weights to prune, from whole tensors
                           always: set the pruned weights to zero

A mask is divided over processes as its parameter is, so setting zeros needs no communication. Only choosing them
gathers shards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

from unisono.checkpoint.sharded_state import shard_like
from unisono.distributed.process_group import from_local_like, to_local, wrap_peer_errors
from unisono.errors import CheckpointError, LoopError
from unisono.pruning.sparsity_schedule import SparsitySchedule


class PrunedWeights(ABC):
    """Parameters of a model, of which some elements are kept at zero.

    needs_equal_weights  tells `step.update` that all processes must hold the same weights after every update
    params               the parameters, by name
    pruned               where they are pruned, bool of the same shape; sharded as the parameter is
    settings             what a resume must not change
    """

    needs_equal_weights = True

    def __init__(
        self, params: Mapping[str, torch.nn.Parameter], schedule: SparsitySchedule, settings: Mapping[str, Any]
    ) -> None:
        if not params:
            raise LoopError(
                f"{type(self).__name__} has nothing to prune.",
                "The model has no parameter that trains, has at least two dims and fits.",
                "place the model first, unfreeze its parameters, or name others with names=[...].",
            )
        self.params, self.schedule = dict(params), schedule
        self.settings = {"method": type(self).__name__, **vars(schedule), **settings}
        self.pruned = {name: self._like(p, torch.bool) for name, p in params.items()}
        self._counts = dict.fromkeys(params, 0)
        self._updates = 0

    @property
    def zeros(self) -> dict[str, int]:
        """The number of pruned weights of each parameter, by name; the same on every process."""
        return dict(self._counts)

    @property
    def sparsity(self) -> float:
        """The fraction of pruned weights, of all parameters together; the same on every process."""
        return sum(self._counts.values()) / sum(p.numel() for p in self.params.values())

    @torch.no_grad()
    def step(self) -> None:
        """Count an update, choose the weights to prune if that is due, and set all pruned weights to zero.

        `step.update` calls it, after the optimizers.

        Raises:
            PeerLostError: A process dies while shards are gathered.
        """
        self._updates += 1
        sparsity = self.schedule.at(self._updates)
        if sparsity is not None:
            with wrap_peer_errors("Pruning"):
                self._choose(sparsity)
        for name, p in self.params.items():
            if self._counts[name]:
                to_local(p).masked_fill_(to_local(self.pruned[name]), 0.0)

    @abstractmethod
    def _choose(self, sparsity: float) -> None:
        """Choose the weights to prune, and call `_prune` for each parameter."""

    def _prune(self, name: str, chosen: torch.Tensor) -> None:
        """Prune a parameter where `chosen`, bool of the whole parameter, is true, and nowhere else."""
        self._counts[name] = int(chosen.sum())
        to_local(self.pruned[name]).copy_(to_local(shard_like(chosen, self.params[name])))

    def _like(self, p: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros, laid out as a parameter is."""
        return from_local_like(torch.zeros_like(to_local(p.detach()), dtype=dtype), p)

    # -- checkpoints

    def _tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the state that has a tensor for each parameter, by kind and name."""
        return {"pruned": self.pruned}

    def state_dict(self) -> dict[str, Any]:
        """Return the masks, the number of updates, and the settings that a resume must not change."""
        return {
            "settings": dict(self.settings),
            "updates": self._updates,
            "zeros": dict(self._counts),
            **{kind: dict(tensors) for kind, tensors in self._tensors().items()},
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of a pruning with the same settings, on any number of processes.

        Raises:
            CheckpointError: The saved state has other settings, or is of other parameters.
        """
        self._check(state)
        for kind, tensors in self._tensors().items():
            for name, tensor in tensors.items():
                to_local(tensor).copy_(to_local(shard_like(state[kind][name], self.params[name])))
        self._updates, self._counts = state["updates"], dict(state["zeros"])

    def _check(self, state: Mapping[str, Any]) -> None:
        saved = state["settings"]
        changed = [name for name in {**saved, **self.settings} if saved.get(name) != self.settings.get(name)]
        if changed:
            pairs = [f"{name}={saved.get(name)!r}, and is {self.settings.get(name)!r} now" for name in changed]
            raise CheckpointError(
                "Cannot resume with another pruning.",
                f"The checkpoint has {'; '.join(pairs)}.",
                "pass the values of the checkpoint, or start a new run in another --run-dir.",
            )
        for kind, tensors in self._tensors().items():
            found = {name: tuple(tensor.shape) for name, tensor in state[kind].items()}
            wanted = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            other = sorted(name for name in {**found, **wanted} if found.get(name) != wanted.get(name))
            if other:
                raise CheckpointError(
                    "Cannot resume with a pruning of other parameters.",
                    f"{other[0]} has the shape {found.get(other[0], 'none')} in the checkpoint and "
                    f"{wanted.get(other[0], 'none')} now.",
                    "prune the same parameters as the run that saved it, or start a new run in another --run-dir.",
                )
