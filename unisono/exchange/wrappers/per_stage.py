"""Several exchanges as one, for a process that holds several pipeline stages, whose backward passes alternate.

Each stage's micro-batches come in order, so each stage has an exchange of its own, and the pipeline
(train/pipelining/pipeline_run.py) enters that one. They finish one after the other, first stage first, on all processes
that hold these stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from unisono.exchange.base import Exchange, Spans, Weights
from unisono.plan.reduction_tree import Node


class NoExchange(Exchange):
    """The exchange of a stage without parameters that train: it does nothing."""

    promise = "exact"
    reason = "nothing is added up"
    params: Sequence[torch.nn.Parameter] = ()
    sent = plain = 0.0

    def finish(self, weight: float) -> bool:
        return True


class PerStageExchange:
    """Call the exchange of each stage.

    Args:
        params: The parameters of all stages.
        parts: The exchange of each stage, over some of `params`; a parameter that several stages use is in several.
    """

    promise = "exact"
    reason = "one fixed tree for each stage adds the gradients of the virtual ranks, wherever they were computed"

    def __init__(self, params: Sequence[torch.nn.Parameter], parts: Sequence[Exchange]) -> None:
        self.params, self.parts = params, parts

    def begin(self, spans: Spans, pieces: Mapping[int, int], weights: Weights) -> None:
        for part in self.parts:
            part.begin(spans, pieces, weights)

    def enter(self, virtual_rank: int, *, last: bool) -> None:
        raise AssertionError("enter the exchange of a stage")

    def leave(self) -> None:
        raise AssertionError("leave the exchange of a stage")

    def launch(self) -> None:
        for part in self.parts:
            part.launch()

    def held(self) -> Mapping[Node, Any]:
        return {}

    def finish(self, weight: float) -> bool:
        """Set p.grad to the sum over all processes and over the stages that use it, first stage first."""
        is_finite, sums = True, dict[int, torch.Tensor]()
        for part in self.parts:
            is_finite &= part.finish(weight)
            for p in part.params:
                if p.grad is not None:
                    sums[id(p)] = sums[id(p)].add_(p.grad) if id(p) in sums else p.grad
        for p in self.params:
            p.grad = sums.get(id(p))
        return is_finite

    def commit(self) -> None:
        for part in self.parts:
            part.commit()

    def zero(self) -> None:
        for part in self.parts:
            part.zero()

    @property
    def used(self) -> Sequence[bool]:
        known: dict[int, bool] = {}
        for part in self.parts:
            for p, was in zip(part.params, part.used, strict=True):
                known[id(p)] = known.get(id(p), False) or was
        return [known[id(p)] for p in self.params]

    def state_dict(self) -> dict[str, Any]:
        states = {number: part.state_dict() for number, part in enumerate(self.parts)}
        return {str(number): state for number, state in states.items() if state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for number, saved in state.items():
            self.parts[int(number)].load_state_dict(saved)

    @property
    def sent(self) -> float:
        return sum(part.sent for part in self.parts)

    @property
    def plain(self) -> float:
        return sum(part.plain for part in self.parts)

    @property
    def touched(self) -> bool:
        return any(part.touched for part in self.parts)

    def close(self) -> None:
        for part in self.parts:
            part.close()
