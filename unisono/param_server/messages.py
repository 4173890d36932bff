"""The messages between servers and workers of an asynchronous run: gradients, and parameters and buffers in return.

Parameters are identified by their number in the run's models, buffers by their position, on all processes alike.
Trained parameters are sent to and from the server that holds them. Buffers that a forward pass changes (batch norm's
statistics) come from the worker: the first server receives them with the gradient, and sends the newest ones to other
workers. So with several workers these buffers reflect fewer steps than the run has done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from unisono.distributed.roles import RoleGroup
from unisono.errors import LoopError
from unisono.train.gradient_pass import GradientPass
from unisono.train.modules.buffer_sync import BufferSlot, Mark, slots_of
from unisono.train.modules.models import Models


class ParameterMessages:
    """Pack and unpack the parameters, buffers and gradients of one process."""

    def __init__(self, models: Models, crew: RoleGroup) -> None:
        self.models, self.crew = models, crew
        crew.shares.assign(models.params)
        self._marks: dict[int, Mark] = {}  # the marks of buffers when they arrived
        self._moved: set[int] = set()  # buffers that a forward pass changes

    def _slots(self) -> list[BufferSlot]:
        found: dict[tuple[int, str], BufferSlot] = {}
        for model in [*self.models.modules, *self.models.tracked]:
            for slot in slots_of(model):
                found.setdefault((id(slot.holder), slot.key), slot)
        return list(found.values())

    # -- parameters and buffers, from a server

    def packed(self, *, everything: bool) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """Return copies of the trained parameters that are held here, and of the buffers that change.

        `everything`: all parameters and buffers, for a worker that has none yet.
        """
        params = [(i, p) for i, p in self._held_by(self.crew.rank) if p.requires_grad or everything]
        first = self.crew.rank == 0
        slots = [
            (i, s.holder[s.key]) for i, s in enumerate(self._slots()) if first and (everything or i in self._moved)
        ]
        held = [(i, b) for i, b in slots if b is not None]
        about = {"params": [i for i, _ in params], "buffers": [i for i, _ in held]}
        return about, [tensor.detach().to("cpu", copy=True) for _, tensor in [*params, *held]]

    def unpack(self, about: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> None:
        """Copy the tensors that a server has sent into the models."""
        numbers, count = about["params"], len(self.models.params)
        if numbers and numbers[-1] >= count:
            raise self._grown(max(numbers) + 1, count)
        with torch.no_grad():
            for number, value in zip(numbers, tensors, strict=False):
                self.models.params[number].copy_(value)
        self._take_buffers(about["buffers"], tensors[len(numbers) :])

    def mark(self) -> None:
        """Save marks of the buffers: changes from now on come from a forward pass."""
        self._marks = {i: slot.look() for i, slot in enumerate(self._slots())}

    def _held_by(self, server: int) -> list[tuple[int, torch.nn.Parameter]]:
        return [(i, p) for i, p in enumerate(self.models.params) if self.crew.shares.of(p) == server]

    def _take_buffers(self, numbers: Sequence[int], values: Sequence[torch.Tensor]) -> None:
        slots = self._slots()
        with torch.no_grad():
            for number, value in zip(numbers, values, strict=True):
                slot = slots[number]
                now = slot.holder[slot.key]
                if now is not None and now.shape == value.shape and now.dtype == value.dtype:
                    now.copy_(value)
                else:
                    slot.holder[slot.key] = value.to(self.models.group.device)

    # -- gradients and buffers, from a worker

    def pushed(self, gradient: GradientPass, server: int) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """Return the part of a gradient that a server holds. For the first server, also return the changed buffers."""
        ours = set(map(id, gradient.params))
        grads = [(i, p.grad) for i, p in self._held_by(server) if id(p) in ours and p.grad is not None]
        slots = self._slots() if server == 0 else []
        changed = [(i, s.holder[s.key]) for i, s in enumerate(slots) if s.look() != self._marks.get(i)]
        held = [(i, b) for i, b in changed if b is not None]
        about = {"grads": [i for i, _ in grads], "buffers": [i for i, _ in held]}
        dense = [grad if grad.layout is torch.strided else grad.to_dense() for _, grad in grads]
        return about, [*dense, *(b for _, b in held)]

    def take(self, gradient: GradientPass, about: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> None:
        """Set p.grad, and buffers, to the values that a worker has sent."""
        numbers, params = about["grads"], self.models.params
        if numbers and max(numbers) >= len(params):
            raise self._grown(len(params), max(numbers) + 1)
        ours = set(map(id, gradient.params))
        for p in gradient.params:
            p.grad = None
        for number, grad in zip(numbers, tensors, strict=False):
            p = params[number]
            if id(p) in ours:
                p.grad = grad.to(p.device)
        gradient.finite, gradient.seen = bool(about["finite"]), True
        self._moved |= set(about["buffers"])
        self._take_buffers(about["buffers"], tensors[len(numbers) :])

    def _grown(self, server: int, worker: int) -> LoopError:
        return LoopError(
            "A model has grown between two steps.",
            f"The server has {server} parameters, and a worker {worker}: without common steps, the time is unknown.",
            "--set server.staleness=0, or --set exchange=tree.",
        )
