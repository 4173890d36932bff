"""One exchange for the first steps of a run, another one from then on.

    step        0 ... begin - 1                begin ...
    exchange    first (nothing carried)        then

At the start gradients are large and turn quickly, and what is left out of them comes too late to be of use. So
compressing begins when a run has been under way for a while (torch's PowerSGD hook: `start_powerSGD_iter`; a schedule
in Lin et al., Deep Gradient Compression, arXiv 1712.01887). Steps are counted here, and the count is in the
checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from unisono.exchange.base import Exchange, Spans, Weights
from unisono.exchange.wrappers.exchange_wrapper import ExchangeWrapper


class WarmupExchange(ExchangeWrapper):
    """`build`: makes the second one, when its first step comes; `kind`: its class, whose promise is that of the run."""

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        first: Exchange,
        kind: Any,
        build: Callable[[], Exchange],
        begin: int,
    ) -> None:
        self.params, self.promise, self.reason = params, kind.promise, kind.reason
        self.inner, self._build, self._begin = first, build, begin
        self.steps = 0
        self._later = False

    def _change(self) -> None:
        self._later = True
        self.inner.close()
        self.inner = self._build()

    def begin(self, spans: Spans, pieces: Mapping[int, int], weights: Weights) -> None:
        if self.steps >= self._begin and not self._later:
            self._change()
        self.steps += 1
        self.inner.begin(spans, pieces, weights)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "now": self.inner.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = int(state["steps"])
        if self.steps > self._begin:  # the one that was saved is the second
            self._change()
        self.inner.load_state_dict(state["now"])
