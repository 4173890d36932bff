"""Exchanges that a script defines: `run.steps(data, exchange=Mine)`. docs/guide/exchanges/custom.md has an example."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from unisono.config import Settings, flatten
from unisono.config.conflicts import NOT_WITH_CUSTOM_EXCHANGE
from unisono.distributed.collectives import Collectives
from unisono.distributed.process_group import ProcessGroup
from unisono.errors import LoopError
from unisono.exchange.base import PROMISES, Exchange

if TYPE_CHECKING:
    from unisono.config.mesh_shape import MeshShape

Build = Callable[[Sequence[torch.nn.Parameter], int, Collectives], Exchange]
"""(parameters, virtual ranks, what processes do together) -> an exchange over them. A class is one."""

NEEDED = ("promise", "reason", "params", "finish")
"""What unisono.Exchange leaves to those that inherit from it."""


class CustomExchange:
    """Builds a script's exchange, and knows what it promises.

    name  what it is called in a checkpoint
    """

    def __init__(self, build: Build) -> None:
        self.build = build
        inner = getattr(build, "func", build)  # of a partial
        self.name = getattr(inner, "__qualname__", type(inner).__name__)
        self.promise = str(getattr(inner, "promise", "unknown"))
        self.reason = str(getattr(inner, "reason", f"{self.name} was never built"))

    def __call__(self, params: Sequence[torch.nn.Parameter], virtual_ranks: int, group: ProcessGroup) -> Exchange:
        exchange = self.build(params, virtual_ranks, Collectives(group))
        members = [name for name in dir(Exchange) if not name.startswith("_")]
        lacks = [name for name in dict.fromkeys([*NEEDED, *members]) if not hasattr(exchange, name)]
        if getattr(type(exchange), "finish", None) is Exchange.finish:
            lacks.append("finish")
        if lacks:
            raise LoopError(
                f"run.steps was given {self.name} as its exchange, which built a {type(exchange).__name__}.",
                f"It lacks {' and '.join(lacks)}.",
                "class Mine(unisono.Exchange), with promise = 'exact', reason = 'why', self.params = params and "
                "def finish(self, weight): docs/guide/exchanges/custom.md.",
            )
        if exchange.promise not in PROMISES:
            raise LoopError(
                f"run.steps was given {self.name} as its exchange, whose promise is {exchange.promise!r}.",
                f"It goes into result.json, and is one of {len(PROMISES)}: {', '.join(map(repr, PROMISES))}.",
                f"promise = {PROMISES[2]!r}, say, if its sums depend on the number of processes.",
            )
        self.promise, self.reason = exchange.promise, exchange.reason
        return exchange


def own_exchange(build: Any, settings: Settings, axes: MeshShape) -> CustomExchange | None:
    """The script's exchange, if it has one. Raises LoopError for what cannot be one, and beside settings that nobody
    would read then."""
    if build is None:
        return None
    if not callable(build):
        raise LoopError(
            f"run.steps was given a {type(build).__name__} as its exchange.",
            "It is built here, over the parameters that train, and again when others train.",
            "hand in its class, or a function: exchange=lambda params, virtual_ranks, group: Mine(params, group).",
        )
    own = CustomExchange(build)
    values = flatten(settings) | {f"parallel.{axis}": size for axis, size in axes._asdict().items()}
    for condition in NOT_WITH_CUSTOM_EXCHANGE:
        if condition.holds(values[condition.name]):
            raise LoopError(
                f"run.steps was given {own.name} as its exchange, and {condition.describe(values)}.",
                "A custom exchange averages the gradients of whole models by itself.",
                f"--set {condition.change}, or run.steps without exchange=.",
            )
    return own
