"""An exchange that a script defines: `run.steps(data, exchange=Mine)`. docs/guide/exchanges/custom.md shows one."""

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
"""build(parameters, virtual ranks, collectives) returns an exchange over the parameters. A class is one."""

REQUIRED = ("promise", "reason", "params", "finish")
"""The members that a subclass of unisono.Exchange must define."""


class CustomExchange:
    """Build a script's exchange, and hold its promise.

    Args:
        build: Builds the exchange.

    Attributes:
        name: Its name in a checkpoint.
    """

    def __init__(self, build: Build) -> None:
        self.build = build
        target = getattr(build, "func", build)  # of a functools.partial
        self.name = getattr(target, "__qualname__", type(target).__name__)
        self.promise = str(getattr(target, "promise", "unknown"))
        self.reason = str(getattr(target, "reason", f"{self.name} was never built"))

    def __call__(self, params: Sequence[torch.nn.Parameter], virtual_ranks: int, group: ProcessGroup) -> Exchange:
        exchange = self.build(params, virtual_ranks, Collectives(group))
        members = [name for name in dir(Exchange) if not name.startswith("_")]
        missing = [name for name in dict.fromkeys([*REQUIRED, *members]) if not hasattr(exchange, name)]
        if getattr(type(exchange), "finish", None) is Exchange.finish:
            missing.append("finish")
        if missing:
            raise LoopError(
                f"{self.name} is no exchange: it lacks {' and '.join(missing)}.",
                f"run.steps was called with exchange={self.name}, which built a {type(exchange).__name__}.",
                "class Mine(unisono.Exchange), with promise = 'exact', reason = 'why', self.params = params and "
                "def finish(self, weight): docs/guide/exchanges/custom.md.",
            )
        if exchange.promise not in PROMISES:
            raise LoopError(
                f"{self.name} has an unknown promise: {exchange.promise!r}.",
                f"It goes into result.json, and is one of {len(PROMISES)}: {', '.join(map(repr, PROMISES))}.",
                f"promise = {PROMISES[2]!r}, for instance, if its sums depend on the number of processes.",
            )
        self.promise, self.reason = exchange.promise, exchange.reason
        return exchange


def own_exchange(build: Any, settings: Settings, axes: MeshShape) -> CustomExchange | None:
    """Return the script's exchange, if it has one.

    Raises:
        LoopError: It cannot be called, or settings are set that it would not read.
    """
    if build is None:
        return None
    if not callable(build):
        raise LoopError(
            f"run.steps got an exchange that cannot be called: a {type(build).__name__}.",
            "It is called with the parameters that train, and again when others train.",
            "pass its class, or a function: exchange=lambda params, virtual_ranks, group: Mine(params, group).",
        )
    own = CustomExchange(build)
    values = flatten(settings) | {f"parallel.{axis}": size for axis, size in axes._asdict().items()}
    for condition in NOT_WITH_CUSTOM_EXCHANGE:
        if condition.holds(values[condition.name]):
            raise LoopError(
                f"{own.name} does not work with {condition.describe(values)}.",
                "A custom exchange averages the gradients of whole models by itself.",
                f"--set {condition.change}, or run.steps without exchange=.",
            )
    return own
