"""The record of a virtual rank in a verified step: its samples, losses and gradients, by micro-batch."""

from __future__ import annotations

from typing import Any

import torch

from unisono.distributed.process_group import to_local
from unisono.plan.rng_keys import mix
from unisono.tensors.digest import tensor_hash

Facts = dict[str, tuple[str, str, int]]
"""By the part of the model and the micro-batch's number: a digest of its samples; its loss and weight, as text that
keeps every bit; and one number for all its gradients. It is a JSON object."""


class PassRecord:
    """Collect facts while micro-batches of one virtual rank are computed.

    parameters  number of parameters
    part        the part of the model on this process: its rank on the axis `tensor`
    gradients   by micro-batch, a number for each parameter; set by `facts`
    """

    def __init__(self, parameters: int, part: int) -> None:
        self._parameters, self._part = parameters, part
        self._samples: dict[int, str] = {}
        self._losses: dict[int, tuple[Any, Any]] = {}
        self._sums: dict[int, list[list[torch.Tensor]]] = {}
        self.gradients: dict[str, list[int]] = {}

    def begin(self, number: int, samples: str) -> None:
        """Begin micro-batch `number`, with samples of this digest."""
        self._samples[number] = samples
        self._sums[number] = [[] for _ in range(self._parameters)]

    def loss(self, number: int, loss: torch.Tensor, weight: float | torch.Tensor) -> None:
        """Record the loss of a micro-batch, without a synchronization with the accelerator."""
        self._losses[number] = loss.detach().clone(), weight

    def gradient(self, number: int, parameter: int, grad: torch.Tensor) -> None:
        """Record a gradient of a parameter."""
        self._sums[number][parameter].append(tensor_hash(to_local(grad.detach())))

    def facts(self) -> Facts:
        """Return the recorded facts. Waits for the accelerator, if there is one."""
        key, losses = {n: f"{self._part}.{n}" for n in self._samples}, self._losses
        self.gradients = {key[n]: [mix(*map(int, sums)) for sums in of_all] for n, of_all in self._sums.items()}
        said = {n: f"{float(losses[n][0]).hex()}, weight {float(losses[n][1]).hex()}" for n in losses}
        return {
            key[n]: (samples, said.get(n, "none"), mix(*self.gradients[key[n]])) for n, samples in self._samples.items()
        }
