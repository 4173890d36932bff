"""The gradient of some parameters, from the first backward of a pass to the update that uses it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import TYPE_CHECKING

import torch

from unisono.errors import LoopError
from unisono.exchange import Exchange, Spans, Weights, build_exchange
from unisono.exchange.buckets import finite
from unisono.train.buffers import versions
from unisono.world.collectives import Group

if TYPE_CHECKING:
    from unisono.settings import Settings
    from unisono.train.step import Step


class Gradient:
    """Its parameters, and the exchange that makes it whole.

    only    None: all parameters that train. Otherwise these alone, whatever else the loss depends on
    finite  is what the last pass made of it finite, on every process?
    """

    exchange: Exchange

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        names: Mapping[int, str],
        settings: Settings,
        group: Group,
        *,
        only: bool = False,
    ) -> None:
        self.params, self.names, self.group = params, names, group
        self.inputs = list(params) if only else None
        self.exchange = build_exchange(settings.exchange, params, settings.virtual_ranks, group)
        self.finite = True
        self.may_skip = False  # was it computed at a scale of fp16's that can be lowered?
        self.seen = False  # has a backward of it been looked at closely?
        self._given: list[torch.Tensor | None] = []  # the gradients, when they were whole
        self._versions: list[int] = []  # how often each had been written to
        self._token = torch.zeros(1, device=group.device)

    def begin(self, spans: Spans, pieces: Mapping[int, int], weights: Weights) -> None:
        self.exchange.begin(spans, pieces, weights)

    def finish(self, weight: float, *, unused: bool) -> None:
        """p.grad becomes the sum over all processes, divided by `weight`; None, where nobody used the parameter."""
        exchange = self.exchange
        whole = exchange.finish(weight)
        if unused:
            used = torch.tensor(exchange.used, dtype=torch.uint8, device=self.group.device)
            for p, by_anyone in zip(self.params, self.group.max_(used).tolist(), strict=True):
                if not by_anyone:
                    p.grad = None  # as in plain torch
        if self.group.size > 1:  # nobody finishes this unless everybody holds the whole gradient
            self._token.fill_(not whole)
            whole = self.group.sum_(self._token).item() == 0.0
        exchange.commit()
        self.finite = whole
        self._given = [p.grad for p in self.params]
        self._versions = versions(self._given)

    def check_finite(self, step: Step) -> None:
        """Refuse a gradient that is not finite, naming the first parameter that has it."""
        given, self._given = self._given, []
        # the exchange knows what it has made, but not what the loop has put there since
        grads = [p.grad for p in self.params]
        untouched = len(given) == len(grads) and all(map(is_, grads, given)) and versions(grads) == self._versions
        if self.finite and untouched:
            return
        for p in self.params:
            if p.grad is not None and not finite(p.grad):
                raise LoopError(
                    f"Step {step.number} has a gradient that is not finite, with a loss of {step.loss:g}.",
                    f"{self.names.get(id(p), 'A parameter')} of shape {tuple(p.shape)} is the first that has "
                    f"{int((~torch.isfinite(p.grad.to_dense())).sum())} such elements.",
                    "look for a division by zero, sqrt or log at 0 behind that parameter, or lower the learning rate.",
                )

    def zero(self) -> None:
        self.exchange.zero()

    def close(self) -> None:
        self.exchange.close()
