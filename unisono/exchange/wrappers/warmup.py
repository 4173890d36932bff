"""Use one exchange in the first steps of a run, and another one after them.

    step        0 ... start_step - 1           start_step ...
    exchange    first (no state)               second

Early gradients are large and turn quickly, so what compression leaves out of them arrives too late to help. Compression
therefore begins after some steps (torch's PowerSGD hook: `start_powerSGD_iter`; a schedule in Lin et al., Deep Gradient
Compression, arXiv 1712.01887). Steps are counted here, and the count is in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from unisono.exchange.base import Exchange, Spans, Weights
from unisono.exchange.wrappers.exchange_wrapper import ExchangeWrapper


class WarmupExchange(ExchangeWrapper):
    """Replace an exchange by another one at a given step.

    Args:
        params: The parameters.
        first: The exchange of the first steps.
        kind: The class of the second exchange. Its promise is that of the run.
        build: Builds the second exchange when its first step begins.
        start_step: The first step of the second exchange.
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        first: Exchange,
        kind: Any,
        build: Callable[[], Exchange],
        start_step: int,
    ) -> None:
        self.params, self.promise, self.reason = params, kind.promise, kind.reason
        self.inner, self._build, self._start_step = first, build, start_step
        self.steps = 0
        self._is_replaced = False

    def _replace(self) -> None:
        self._is_replaced = True
        self.inner.close()
        self.inner = self._build()

    def begin(self, spans: Spans, pieces: Mapping[int, int], weights: Weights) -> None:
        if self.steps >= self._start_step and not self._is_replaced:
            self._replace()
        self.steps += 1
        self.inner.begin(spans, pieces, weights)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "now": self.inner.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = int(state["steps"])
        if self.steps > self._start_step:  # the state is that of the second exchange
            self._replace()
        self.inner.load_state_dict(state["now"])
